"""A package of this name that opacus installs would else be found first."""
