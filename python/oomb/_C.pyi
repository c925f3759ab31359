"""Typed surface of the native core; the functions are defined in csrc/bindings."""

from typing import TypedDict

class BuildInfo(TypedDict):
    version: str
    compiler: str
    build_type: str
    cuda: bool
    cuda_compiler: str
    cuda_architectures: list[str]

class Device(TypedDict):
    index: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    total_bytes: int
    problem: str

class CudaStatus(TypedDict):
    built: bool
    runtime_version: int
    driver_version: int
    devices: list[Device]
    problem: str

def build_info() -> BuildInfo: ...
def cuda_status() -> CudaStatus: ...
