"""Modules of libraries that are not installed are left out where docstrings are collected."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("haiku") else ["haiku_modules.py"]
