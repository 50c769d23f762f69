"""Tags the wheel: any Python 3, and the libraries' platform (from packages/build.py)."""

import os

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class Compiled(Distribution):
    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", os.environ["TANDEM_WHEEL_PLATFORM"]


setup(distclass=Compiled, cmdclass={"bdist_wheel": PlatformWheel})
