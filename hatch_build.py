"""Wheels carry the kernels compiled, where there is a compiler; else they are pure, and compile on first use."""

import os
import runpy
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags


class CompileKernels(BuildHookInterface):
    """Compiles `paceline/kernels` into the wheel and names the wheel after the platform.

    $PACELINE_WHEEL asks for a platform of `WHEELS` in `compiler.py`, or with "any" for a pure wheel.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before a wheel is packed; `version` is "editable" where the checkout itself gets installed."""
        self._work = Path(tempfile.mkdtemp())
        asked = os.environ.get("PACELINE_WHEEL")
        if version == "editable" or asked == "any":
            return
        kernels = runpy.run_path(str(Path(self.root) / "paceline" / "kernels" / "compiler.py"))
        if asked and asked not in kernels["WHEELS"]:
            sys.exit(f"PACELINE_WHEEL: no such wheel. Got: {asked}. Expected: any, {', '.join(kernels['WHEELS'])}.")
        target = kernels["WHEELS"][asked][0] if asked else kernels["HOST"]
        library = self._work / kernels["LIBRARY"]
        try:
            compiler = kernels["find_zig"](target) if asked else kernels["find_compiler"]()
            missing = kernels["compile_library"](library, compiler, target=target)
            if asked and missing:
                raise kernels["CompileError"](f"{compiler.name} cannot compile {missing}")
        except kernels["CompileError"] as error:
            if asked:
                sys.exit(f"{asked}: {error}")
            print(f"The wheel has no compiled kernels: {error}", file=sys.stderr)
            return
        tags = [tag.platform for tag in sys_tags()]
        platform = asked or next(tag for tag in tags if "many" not in tag and "musl" not in tag)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["force_include"][str(library)] = f"paceline/kernels/{library.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """After it."""
        shutil.rmtree(self._work, ignore_errors=True)
