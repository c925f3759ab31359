"""Builds oomb._C by calling CMake. Metadata is in pyproject.toml, all build logic in CMake.

Environment: OOMB_CUDA=auto|on|off, OOMB_BUILD_DIR (kept between builds), CMAKE_ARGS (extra).
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        wanted = Path(self.get_ext_fullpath(ext.name)).resolve()
        # Editable: CMake itself writes into the source tree, so that `cmake --build` updates it.
        output = ROOT / "python" / "oomb" if self.editable_mode else wanted.parent
        build = Path(os.environ.get("OOMB_BUILD_DIR", self.build_temp)).resolve()
        cmake = shutil.which("cmake") or sys.exit("cmake: not found; pip install cmake ninja")
        subprocess.run(
            [
                cmake, f"-S{ROOT}", f"-B{build}", "-GNinja",
                "-DCMAKE_BUILD_TYPE=Release",
                "-DOOMB_WERROR=OFF",  # a newer compiler's warning must not stop an installation
                f"-DOOMB_CUDA={os.environ.get('OOMB_CUDA', 'auto')}",
                f"-DOOMB_PYTHON_OUTPUT_DIR={output}",
                f"-DPython_EXECUTABLE={sys.executable}",
                *shlex.split(os.environ.get("CMAKE_ARGS", "")),
            ],
            check=True,
        )  # fmt: skip
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
        subprocess.run([cmake, "--build", str(build), "--parallel", jobs], check=True)
        if self.editable_mode:
            self.mkpath(str(wanted.parent))
            self.copy_file(str(output / wanted.name), str(wanted))


setup(ext_modules=[Extension("oomb._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
