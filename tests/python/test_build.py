"""The extension, the package metadata and the scripts of the build agree with one another."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from oomb import _C

ROOT = Path(__file__).resolve().parents[2]


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class TestExtension:
    def test_has_the_version_of_the_package(self) -> None:
        assert _C.build_info()["version"] == importlib.metadata.version("oomb")

    def test_cuda_status_explains_a_missing_device(self) -> None:
        status = _C.cuda_status()
        assert status["built"] == _C.build_info()["cuda"]
        assert bool(status["devices"]) != bool(status["problem"])

    def test_loads_without_torch(self) -> None:
        """In a fresh process, straight from its file: no other module of ours, no torch."""
        code = (
            "import importlib.util, sys\n"
            f"spec = importlib.util.spec_from_file_location('_C', {_C.__file__!r})\n"
            "module = importlib.util.module_from_spec(spec)\n"
            "spec.loader.exec_module(module)\n"
            "assert 'torch' not in sys.modules\n"
            "print(module.build_info()['version'])\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == _C.build_info()["version"]


def test_links_of_the_metadata_are_those_of_the_citation() -> None:
    """A label holds no comma: the metadata has ``label, link`` in one line."""
    (section,) = re.findall(
        r"^\[project\.urls\]\n(.*?)\n\n", (ROOT / "pyproject.toml").read_text(), re.S | re.M
    )
    links = re.findall(r'^"([^,"]{1,32})" = "(.*)"$', section, re.M)
    citation = (ROOT / "CITATION.cff").read_text()
    assert len(links) == len(section.splitlines()) > 0
    assert all(f"url: {link}\n" in citation for _, link in links)


class TestLayers:
    layers = load("scripts/check_layers.py")

    def test_the_tree_is_clean(self) -> None:
        assert self.layers.main() == 0

    @pytest.mark.parametrize(
        ("folder", "include", "reason"),
        [
            ("paging", '#include "offload/copy_engine.h"', "paging may not include offload"),
            ("attention", '#include "memory/resource.h"', "attention may not include memory"),
            ("bindings", "#include <torch/extension.h>", "no torch in csrc/"),
            ("memory", "#include <pybind11/pybind11.h>", "only bindings/ may include it"),
            ("memory", '#include "resource.h"', "included from csrc/"),
        ],
    )
    def test_finds(self, folder: str, include: str, reason: str) -> None:
        (found,) = self.layers.cpp_violations(folder, f"#pragma once\n{include}\n")
        assert reason in found

    def test_allows_the_arrows(self) -> None:
        text = '#include <vector>\n#include "common/error.h"\n#include "paging/page.h"\n'
        assert self.layers.cpp_violations("offload", text) == []


class TestSpills:
    spills = load("scripts/check_spills.py")
    clean = (
        "ptxas info    : Compiling entry function '_Z1av' for 'sm_90a'\n"
        "ptxas info    : Function properties for _Z1av\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers\n"
    )

    def run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str, *options: str) -> int:
        (tmp_path / "log").write_text(log)
        monkeypatch.setattr(sys, "argv", ["check_spills", str(tmp_path / "log"), *options])
        return int(self.spills.main())

    def test_passes_a_clean_log(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.run(tmp_path, monkeypatch, self.clean, "--require") == 0

    def test_fails_on_a_spill(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        log = self.clean.replace("0 bytes spill loads", "8 bytes spill loads")
        assert self.run(tmp_path, monkeypatch, log) == 1

    def test_ignores_other_architectures(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = self.clean.replace("0 bytes spill loads", "8 bytes spill loads")
        log = log.replace("sm_90a", "sm_80")
        assert self.run(tmp_path, monkeypatch, log) == 0
        assert self.run(tmp_path, monkeypatch, log, "--require") == 1

    def test_fails_on_serialised_wgmma(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        warning = "ptxas info: (C7510) wgmma.mma_async instructions are serialized due to ...\n"
        assert self.run(tmp_path, monkeypatch, self.clean + warning) == 1


class TestToolkit:
    toolkit = load("cmake/toolkit.py")

    def test_finds_pybind11(self) -> None:
        assert (Path(self.toolkit.pybind11_include()) / "pybind11/pybind11.h").exists()

    def test_jobs_fit_into_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self.toolkit.os, "cpu_count", lambda: 64)
        for available, jobs in ((2, 1), (11, 2), (1000, 64)):
            monkeypatch.setattr(self.toolkit, "available_bytes", lambda n=available: n << 30)
            assert self.toolkit.jobs() == jobs

    def test_an_installed_compiler_comes_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nvcc = tmp_path / "nvcc"
        nvcc.write_text("#!/bin/sh\n")
        nvcc.chmod(0o755)
        monkeypatch.setenv("CUDACXX", str(nvcc))
        assert self.toolkit.nvcc("auto") == str(nvcc.resolve())


class TestBuildRequirements:
    """What pip installs before it builds follows OOMB_CUDA and the machine."""

    @pytest.fixture
    def requirements(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
        monkeypatch.syspath_prepend(str(ROOT / "cmake"))
        backend = load("cmake/build_backend.py")

        def ask(mode: str, nvcc: str) -> str:
            monkeypatch.setenv("OOMB_CUDA", mode)
            monkeypatch.setattr(backend.toolkit, "nvcc_on_machine", lambda: nvcc)
            return " ".join(backend.get_requires_for_build_wheel())

        return ask

    def test_nothing_without_cuda(self, requirements: Callable[[str, str], str]) -> None:
        assert requirements("off", "/bin/nvcc") == ""
        assert requirements("auto", "") == ""

    def test_nothing_where_the_machine_has_a_compiler(
        self, requirements: Callable[[str, str], str]
    ) -> None:
        assert requirements("auto", "/bin/nvcc") == ""
        assert requirements("on", "/bin/nvcc") == ""

    def test_a_compiler_where_it_has_none(self, requirements: Callable[[str, str], str]) -> None:
        assert "nvidia-cuda-nvcc==13.0.*" in requirements("on", "")
