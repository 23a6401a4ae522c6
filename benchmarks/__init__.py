"""Without this file Python would import a package of this name that opacus installs."""
