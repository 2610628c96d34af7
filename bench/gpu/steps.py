"""The steps of a run on a GPU: their commands, their needs, and their time limits.

On "cpu" every step runs on a small scale: kernels under Triton's interpreter, ONNX Runtime's CPU provider, tiny models.
So trivial errors show in a rehearsal, before a run on a card.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from bench.gpu.needs import EXPORT, MODEL, SERVICE, TESTS, Need, compiler, cuda_provider, gpu, memory, modules
from specdec.engine.cpu_count import cores_given

Command = list[str]
"""Arguments of the interpreter."""

MAX_TESTS_AT_ONCE = 4
"""Maximum concurrent test files: each process has its own context on the card, of half a GiB or so."""


@dataclass(frozen=True)
class Place:
    """The device of a step, and its result folders: its own, and one shared by all steps."""

    device: str
    folder: Path
    shared: Path

    @property
    def small(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True)
class Step:
    """One step: its commands run one after the other, until one fails."""

    name: str
    about: str
    seconds: float  # at most
    needs: tuple[Need, ...]
    commands: Callable[[Place], list[Command]]


def tests(at: Place) -> list[Command]:
    """Return the command that runs the tests of kernels, engine and devices, without those that compile kernels for
    other cards. Warnings are not failures here, since versions other than the pinned ones have other warnings.
    Compiling kernels takes most of the time, so several files run concurrently if pytest can."""
    folders = ["tests/engine/gpu", "--ignore", "tests/engine/gpu/test_compile.py", "tests/engine/onnx/test_devices.py"]
    chosen = ["tests/engine/gpu/test_kernels.py", "tests/engine/gpu/test_sampler.py"] if at.small else folders
    options = ["-q", "-rs", "-W", "default", "-p", "no:cacheprovider", f"--junitxml={at.folder / 'tests.xml'}"]
    if find_spec("xdist") is not None:
        options += [
            "-n",
            str(min(MAX_TESTS_AT_ONCE, len(chosen) if at.small else cores_given())),
            "--dist",
            "loadfile",
        ]
    return [["-m", "pytest", *options, *chosen]]


def program(module: str, small: str, whole: str = "") -> Callable[[Place], list[Command]]:
    """Return the commands of a step of one program, with the options `small` in a rehearsal and `whole` on a card."""

    def commands(at: Place) -> list[Command]:
        options = (small if at.small else whole).split()
        return [["-m", *module.split(), "--device", at.device, *options, "--out", str(at.folder)]]

    return commands


def speed(at: Place) -> list[Command]:
    """Return the commands that measure speed with and without CUDA graphs, in turns."""
    source, size = ("demo/draft", "4M") if at.small else ("demo/target", "1200M")
    target = str(at.shared / f"padded-{size.lower()}")
    measured = ["--target", target, "--device", at.device, "--peers", "none", "--kinds", "code", "--rounds", "1"]
    if at.small:  # no draft, since each system starts slowly on a CPU; no bfloat16, which few CPUs have
        measured += ["--draft", "none", "--dtype", "float32", "--streams", "1", "--tokens", "16"]
        measured += ["--temperatures", "0", "--learning", "0", "--patience", "0"]
    else:
        measured += ["--draft", "demo/draft", "--dtype", "bfloat16", "--streams", "1,8", "--tokens", "96"]
        measured += ["--temperatures", "0", "--learning", "2", "--patience", "1"]
    return [
        ["-m", "bench", "pad-model", "--source", source, "--out", target, "--parameters", size],
        ["-m", "bench", "speed", *measured, "--out", str(at.folder)],
    ]


_ENGINE = (modules((*MODEL, "numpy", "structlog", "rich")), modules(("triton",)), gpu, compiler)
_SERVICES = (*_ENGINE, modules(SERVICE))

STEPS = (
    Step("tests", "the tests of kernels, engine and devices", 200, (*_ENGINE, modules(TESTS)), tests),
    Step(
        "exactness",
        "exact numerics in float32, bfloat16 and float16",
        120,
        _ENGINE,
        program("bench.gpu.exactness", "--dtypes float32", "--dtypes float32,bfloat16,float16"),
    ),
    Step(
        "graphs",
        "hidden states and logits through CUDA graphs, bit by bit",
        60,
        _ENGINE,
        program("bench.gpu.graphs", "--rows 1,3", "--rows 1,4,16,64,128,256,512"),
    ),
    Step(
        "drafting",
        "a draft by ONNX Runtime in float16 and a verifier on the GPU: the tokens of plain decoding",
        120,
        (*_SERVICES, modules(EXPORT), cuda_provider),
        program("bench.gpu.drafting --engine onnx", "--prompts 1 --tokens 16", "--prompts 8 --tokens 96"),
    ),
    Step(
        "torch-drafting",
        "the same with the draft in the GPU engine",
        120,
        (*_SERVICES, modules(("onnxruntime",))),
        program("bench.gpu.drafting --engine torch", "--prompts 1 --tokens 16", "--prompts 8 --tokens 96"),
    ),
    Step(
        "sampling",
        "the time to choose tokens, by sampling parameters",
        40,
        _ENGINE,
        program("bench.gpu.sampling", "--rows 1,2 --vocabulary 4096 --times 1"),
    ),
    Step(
        "engine",
        "step times over the memory's roofline, 1B",
        100,
        (*_ENGINE, memory(8)),
        program(
            "bench engine",
            "--shape tiny --tokens 1,4 --contexts 64 --sessions 1,2 --seconds 0.1 --peers none",
            "--shape llama-3.2-1b --dtype bfloat16 --exact --tokens 1,4,8,16,64 --contexts 1024,8192 --sessions 1,32 "
            "--seconds 0.5 --peers eager-static --synthetic-acceptance 0.8",
        ),
    ),
    Step(
        "speed",
        "tokens a second of a padded 1.2B target, with CUDA graphs and without",
        300,
        (*_SERVICES, modules(EXPORT), memory(24)),
        speed,
    ),
    Step(
        "kernels",
        "where the time of a step goes, 8B",
        60,
        (*_ENGINE, memory(40)),
        program(
            "bench.engine.kernels",
            "--shape tiny --steps 1x1x64",
            "--shape llama-3.1-8b --steps 1x1x1024,8x1x1024,32x1x1024,8x8x1024,32x8x1024,8x64x1024,1x1x2048,8x1x2048,"
            "32x1x2048",
        ),
    ),
    Step(
        "large-engine",
        "step times over the memory's roofline, 8B",
        100,
        (*_ENGINE, memory(40)),
        program(
            "bench engine --exact",
            "--shape tiny --tokens 1 --contexts 64 --sessions 1 --peers none",
            "--shape llama-3.1-8b --dtype bfloat16 --tokens 1,4,8,16 --contexts 1024,8192 --sessions 1,8 "
            "--seconds 0.5 --peers eager-static",
        ),
    ),
)
"""All steps in order: checks of correctness, then measurements from small models to large ones."""
