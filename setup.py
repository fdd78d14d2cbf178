"""Names the packages: setuptools cannot find them where the root is one itself."""

from setuptools import find_packages, setup

setup(packages=["draftline", *(f"draftline.{name}" for name in find_packages())])
