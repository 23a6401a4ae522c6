"""The style sheet of reports: light and dark, wide and narrow, on screen and on paper."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --text: #1b1d21; --muted: #5a6068; --line: #d5d8dd; --soft: #f3f4f6;
  --link: #0b57b8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #15171b; --text: #e4e6ea; --muted: #a6acb6; --line: #3b4049; --soft: #22262d;
    --link: #86b7ff;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 80rem; background: var(--page);
  color: var(--text); font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; line-height: 1.3; margin: 2.5rem 0 .75rem;
  padding-bottom: .25rem; border-bottom: 1px solid var(--line); }
h3, h4 { font-size: 1.05rem; line-height: 1.35; margin: 1.75rem 0 .5rem; }
p { max-width: 46rem; margin: .75rem 0; overflow-wrap: anywhere; }
a { color: var(--link); }
.scroll { overflow-x: auto; margin: .75rem 0 1.25rem; max-width: 100%; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; text-align: left; vertical-align: top; overflow-wrap: normal;
  border-bottom: 1px solid var(--line); }
thead th { vertical-align: bottom; border-bottom: 2px solid var(--muted); line-height: 1.3; }
.number { text-align: right; }
td.number { white-space: nowrap; }
tbody th { font-weight: 600; min-width: 9.5em; }
.word { display: inline-block; max-width: 100%; }
tr > :first-child { position: sticky; left: 0; background: var(--page); }
figure { margin: 1rem 0 1.5rem; }
.card { overflow-x: auto; background: #ffffff; border: 1px solid var(--line); border-radius: 6px;
  padding: .5rem; }
img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
figcaption, footer { color: var(--muted); font-size: .85rem; margin-top: .35rem; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .875em; }
code { background: var(--soft); padding: .1em .3em; border-radius: 3px; }
pre { background: var(--soft); padding: .75rem 1rem; border-radius: 6px; line-height: 1.45;
  white-space: pre-wrap; overflow-wrap: anywhere; }
pre code { background: none; padding: 0; }
.files { padding-left: 1.2rem; columns: 14rem; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
@media (max-width: 45rem) {
  body { padding: 1rem .75rem 2rem; }
  h1 { font-size: 1.4rem; }
  img { max-width: none; width: 44rem; }
  th, td { padding: .3rem .5rem; }
  tbody th { min-width: 7.5em; }
}
@media print {
  :root { color-scheme: light; --page: #ffffff; --text: #000000; --muted: #444444;
    --line: #bbbbbb; --soft: #f3f4f6; --link: #000000; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  .scroll, .card { overflow: visible; }
  .card { border: 0; padding: 0; }
  img { max-width: 100%; width: auto; }
  table { font-size: 7pt; }
  th, td { padding: .2rem .3rem; }
  tbody th { min-width: 0; }
  td.number { white-space: normal; }
  tr > :first-child { position: static; }
  thead { display: table-header-group; }
  tr, figure, pre { break-inside: avoid; }
  h2, h3, h4 { break-after: avoid; }
}
"""
