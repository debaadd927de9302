"""Wheels carry the kernels compiled, where there is a compiler; else they are pure, and compile on first use."""

import runpy
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags


class CompileKernels(BuildHookInterface):
    """Compiles `paceline/kernels` into the wheel and names the wheel after the platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before a wheel is packed; `version` is "editable" where the checkout itself gets installed."""
        if version == "editable":
            return
        kernels = runpy.run_path(str(Path(self.root) / "paceline" / "kernels" / "compiler.py"))
        self._work = Path(tempfile.mkdtemp())
        library = self._work / kernels["LIBRARY"]
        try:
            kernels["compile_library"](library, kernels["find_compiler"]())
        except kernels["CompileError"] as error:
            print(f"The wheel has no compiled kernels: {error}", file=sys.stderr)
            return
        platform = next(tag.platform for tag in sys_tags() if "many" not in tag.platform and "musl" not in tag.platform)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["force_include"][str(library)] = f"paceline/kernels/{library.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """After it."""
        if version != "editable":
            shutil.rmtree(self._work, ignore_errors=True)
