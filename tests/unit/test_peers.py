"""The comparison with peers: the workers' protocol with a fake model, ratios by hand, bytes read a step."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import onnx
import pytest

from onnxlm.runtime.bench import Case, Plan, Sample
from onnxlm.runtime.memory import Memory

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FAKE = """
import sys
import numpy as np
from protocol import serve

class Fake:
    version = "fake 1.0"
    bytes = 1234

    def prefill(self, ids, new_tokens):
        print("a library says something")
        self.seen = len(ids) + new_tokens

    def step(self):
        if self.seen == 13:
            raise ValueError("unlucky")
        if self.seen == 99:
            sys.exit(7)

    def feed(self, ids, first):
        self.before = 0 if first else self.before
        rows = [[token, self.before + i] for i, token in enumerate(ids)]
        self.before += len(ids)
        return np.array(rows, dtype=np.float64)

def load(arguments):
    if arguments[0] == "absent":
        raise OSError("no such file")
    return Fake()

serve(load)
"""

STREAMED = """
import sys
import time
from protocol import serve

class Streamed:
    version = "fake 1.0"
    bytes = 1

    def generate(self, ids, new_tokens, token):
        for number in range(new_tokens - (len(ids) == 5)):
            time.sleep(0.2 if number == 0 else 0.01)
            token()

    def feed(self, ids, first):
        raise NotImplementedError("this library keeps its logits")

serve(lambda arguments: Streamed())
"""


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a script of `benchmarks/` by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).is_relative_to(BENCHMARKS):
            del sys.modules[name]


@pytest.fixture
def process(modules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`worker_process`, whose workers are one with a fake model."""
    module: ModuleType = modules("worker_process")
    shutil.copy(BENCHMARKS / "workers" / "protocol.py", tmp_path)
    (tmp_path / "fake_worker.py").write_text(FAKE, encoding="utf-8")
    (tmp_path / "streamed_worker.py").write_text(STREAMED, encoding="utf-8")
    monkeypatch.setattr(module, "WORKERS", tmp_path)
    return module


@pytest.fixture
def worker(process: ModuleType) -> Iterator[Any]:
    """A running fake worker."""
    running = process.Worker(process.Spec("fake", "fake", sys.executable, "model", 1))
    running.start()
    yield running
    running.stop()


def test_a_worker_runs_and_reports(worker: Any) -> None:
    assert worker.ready["version"] == "fake 1.0"
    assert worker.ready["bytes"] == 1234
    assert worker.ready["load_s"] >= 0
    sample = worker.run([1, 2, 3], 4)
    assert isinstance(sample, Sample)
    assert sample.prefill_s > 0
    assert len(sample.step_s) == 3


def test_logits_come_in_chunks_of_a_prompt_or_by_the_step(worker: Any, tmp_path: Path) -> None:
    ids = list(range(1000, 1200))
    for way in ("prefill", "decode"):
        folder = tmp_path / way
        folder.mkdir()
        files = worker.ask(do="logits", ids=ids, by=way, out=str(folder))["files"]
        parts = [np.load(file) for file in files]
        assert [(len(part), part.dtype) for part in parts] == [(128, np.float32), (72, np.float32)]
        whole = np.concatenate(parts)
        assert whole[:, 0].tolist() == ids
        assert whole[:, 1].tolist() == list(range(200))  # the cache goes on from chunk to chunk


def test_a_request_that_fails_leaves_the_worker_alive(process: ModuleType, worker: Any) -> None:
    with pytest.raises(process.WorkerError, match=r"^fake: ValueError: unlucky$"):
        worker.run([0] * 9, 4)
    with pytest.raises(process.WorkerError, match=r"^fake: ValueError: no such request: 'dance'$"):
        worker.ask(do="dance")
    assert len(worker.run([0], 2).step_s) == 1


def test_a_worker_that_dies_is_an_error(process: ModuleType, worker: Any) -> None:
    for _ in range(2):  # and stays one
        with pytest.raises(process.WorkerError, match=r"^fake: ended with code 7$"):
            worker.run([0] * 90, 9)


def test_a_worker_that_is_killed_is_an_error(process: ModuleType, worker: Any) -> None:
    worker._process.kill()
    with pytest.raises(process.WorkerError, match=r"^fake: ended by SIGKILL$"):
        worker.run([0], 2)


def test_a_model_that_does_not_load_is_an_error(process: ModuleType) -> None:
    absent = process.Worker(process.Spec("fake", "fake", sys.executable, "absent", 1))
    with pytest.raises(process.WorkerError, match=r"^fake: OSError: no such file$"):
        absent.start()
    absent.stop()


def test_a_library_that_generates_in_one_call_is_timed_by_its_tokens(process: ModuleType) -> None:
    running = process.Worker(process.Spec("s", "streamed", sys.executable, "model", 1))
    running.start()
    try:
        sample = running.run([1, 2], 4)
        assert len(sample.step_s) == 3
        assert sample.prefill_s >= 0.2  # up to the first token
        assert all(step >= 0.01 for step in sample.step_s)
        # Fewer tokens than asked for, as behind an end of text, would pass for a faster run.
        with pytest.raises(process.WorkerError, match=r"asked for 4 tokens, told of 3$"):
            running.run([1] * 5, 4)
    finally:
        running.stop()


def test_an_interpreter_that_is_not_there_is_an_error(process: ModuleType) -> None:
    absent = process.Worker(process.Spec("fake", "fake", "/no/python", "model", 1))
    with pytest.raises(process.WorkerError, match=r"^fake: /no/python: No such file or directory$"):
        absent.start()


def test_who_does_not_load_is_a_row_with_the_reason(
    process: ModuleType, modules: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    peers, report = modules("peers"), modules("peers_report")
    good, bad = (process.Spec(n, "fake", sys.executable, n, 1) for n in ("good", "absent"))
    workers, refused = peers.load([bad, good])
    workers["good"].stop()
    assert list(workers) == ["good"]
    report.print_rows([*refused, report.Row.absent("optimum", "pip failed")])
    out = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert out[1:] == [
        "absent - - - - - - - - - - - -",
        "optimum - - - - - - - - - - - -",
        "not run: absent: OSError: no such file",
        "not run: optimum: pip failed",
    ]
    with pytest.raises(process.WorkerError, match=r"^absent: OSError: no such file$"):
        peers.load([bad])


def test_a_peer_that_cannot_be_set_up_is_left_out(
    modules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = modules("setup_peers")

    def models(home: Any) -> Iterator[tuple[str, Path]]:
        yield "plain", home.files / "plain"
        setup.run(sys.executable, "-c", "raise SystemExit(3)")

    monkeypatch.setitem(setup.PEERS, "some", setup.Peer((), models))
    monkeypatch.setattr(setup, "environment", lambda folder, name: folder / "python")
    words = list(setup.arguments(tmp_path, tmp_path / "m.gguf", tmp_path, "some"))
    failed = f"some=failed with code 3: {sys.executable} -c 'raise SystemExit(3)'"
    assert words == [
        *("--python", f"some={tmp_path / 'python'}", "--some", f"plain={tmp_path / 'plain'}"),
        *("--left-out", failed),
    ]


def test_each_peer_has_a_worker(modules: Any) -> None:
    assert set(modules("setup_peers").PEERS) | {"package"} == set(modules("peers").KINDS)
    for kind in modules("peers").KINDS:
        assert (BENCHMARKS / "workers" / f"{kind}_worker.py").is_file()


def test_contestants_of_a_command_line(modules: Any) -> None:
    peers = modules("peers")
    options = peers.parse(
        [
            *("--source", "m.gguf", "--threads", "3", "--eager", "--compile", "--roofline"),
            *("--llama", "q8=a.gguf", "--package", "int8=p", "--package", "int4=q"),
            *("--python", "llama=/peers/python"),
        ]
    )
    specs = peers.contestants(options)
    assert [s.flags for s in specs] == [(), (), (), (), ("--compile",), ()]
    assert [(s.name, s.kind, s.python, s.path, s.threads) for s in specs] == [
        ("int8", "package", sys.executable, "p", 3),
        ("int4", "package", sys.executable, "q", 3),
        ("q8", "llama", "/peers/python", "a.gguf", 3),
        ("eager fp32", "eager", sys.executable, "m.gguf", 3),
        ("torch.compile fp32", "eager", sys.executable, "m.gguf", 3),
        ("memory read", "memory_read", sys.executable, "-", 3),
    ]


def test_a_contestant_without_a_path_is_refused(modules: Any) -> None:
    peers = modules("peers")
    options = peers.parse(["--source", "m.gguf", "--package", "int8"])
    with pytest.raises(SystemExit, match=r"^--package int8: wants two parts"):
        peers.contestants(options)


def test_workers_take_turns(process: ModuleType, modules: Any) -> None:
    turns: list[tuple[str, int]] = []

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, ids: list[int], new_tokens: int) -> Sample:
            turns.append((self.name, len(ids)))
            return Sample(1.0, (0.5,) * (new_tokens - 1))

    texts = modules("peers_quality").Texts([], {8: [0] * 8, 4: [0] * 4})
    workers = {name: Fake(name) for name in "ab"}
    modules("peers").measure_speed(workers, texts, Plan((Case(8, 3), Case(4, 3)), repeats=1))
    assert turns == [("a", 8), ("b", 8), ("a", 4), ("b", 4)] * 2


def test_ratios_and_the_share_of_the_read_rate(
    modules: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    report = modules("peers_report")

    def row(name: str, step_bytes: int, *rounds: tuple[float, float]) -> Any:
        """Rounds: prefill and decode in tokens a second, of a prompt of 8."""
        samples = tuple(Sample(8 / prefill, (1 / decode,) * 3) for prefill, decode in rounds)
        memory = Memory(None, 200_000_000)
        return report.Row(
            name, "1", 150_000_000, step_bytes, 0.25, memory, prompt_tokens=8, samples=samples
        )

    rows = [
        row("int8", 100_000_000, (900.0, 100.0), (1600.0, 160.0), (800.0, 125.0)),
        row("q8_0", 100_000_000, (600.0, 100.0), (800.0, 80.0), (1000.0, 125.0)),
        row(report.MEMORY, 200_000_000, (1.0, 125.0)),  # 25 GB/s
    ]
    report.print_rows(rows)
    report.print_ratios(rows, [("int8", "q8_0"), ("int8", "absent")])
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in lines[1:3]] == [
        "int8 8 - - - - 900 (800-1600) 125 (100-160) 10.0 50% 150 200 0.25",
        "q8_0 8 - - - - 800 (600-1000) 100 (80-125) 12.5 40% 150 200 0.25",
    ]
    # Of each round: 1.5, 2, 0.8 and 1, 2, 1; the medians alone would give 1.12 and 1.25.
    assert lines[3:] == [
        "memory is read at 25.0 GB/s (prompt 8)",
        "int8 / q8_0 at 8: prefill 1.50x (0.80-2.00), decode 1.00x (1.00-2.00)",
    ]
    first = rows[0].to_dict()["rounds"][0]
    assert (first["prefill_tokens_per_s"], first["decode_tokens_per_s"]) == pytest.approx(
        (900, 100)
    )


def test_quality_of_a_result_can_be_taken_over(modules: Any, tmp_path: Path) -> None:
    report = modules("peers_report")
    quality = report.Quality(1024, 0.0027, 0.5, 0.965, 12.0, 12.1, 0.0083)
    row = report.Row("int8", "1", 1, 1, 0.1, Memory(None, None), quality={"prefill": quality})
    keys = ("threads", "prompt_tokens", "new_tokens", "rounds", "quality_tokens")
    report.save(tmp_path / "new" / "r.json", [row], dict.fromkeys(keys, 1) | {"source": "/home/me"})
    assert report.read_quality(tmp_path / "new" / "r.json") == {"int8": {"prefill": quality}}
    assert "/home/me" not in (tmp_path / "new" / "r.json").read_text(encoding="utf-8")


def test_a_lookup_reads_no_table(modules: Any, tmp_path: Path) -> None:
    table = onnx.numpy_helper.from_array(np.zeros((10, 4), np.float32), "table")
    matrix = onnx.numpy_helper.from_array(np.zeros((4, 6), np.uint8), "matrix")
    nodes = [
        onnx.helper.make_node("Gather", ["table", "ids"], ["x"]),
        onnx.helper.make_node("MatMulInteger", ["x", "matrix"], ["y"]),
    ]
    bytes_per_step = modules("roofline").bytes_per_step

    def measured(head: list[Any]) -> int:
        graph = onnx.helper.make_graph([*nodes, *head], "g", [], [], [table, matrix])
        onnx.save(onnx.helper.make_model(graph), tmp_path / "decode.onnx")
        found: int = bytes_per_step(tmp_path)
        return found

    assert measured([]) == 24
    # A tied head reads the table whole.
    assert measured([onnx.helper.make_node("MatMul", ["y", "table"], ["z"])]) == 24 + 160


@pytest.mark.parametrize(("own_head", "expected"), [(False, 160 + 96), (True, 96 + 80)])
def test_an_embedding_table_is_read_only_as_the_head(
    modules: Any, tmp_path: Path, own_head: bool, expected: int
) -> None:
    file = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((10, 4), np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((6, 4), np.float32))
    if own_head:
        writer.add_tensor("output.weight", np.zeros((10, 4), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert modules("roofline").bytes_per_step(file) == expected


def test_a_folder_without_a_model_has_no_roofline(modules: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is no GGUF file and holds neither decode\.onnx"):
        modules("roofline").bytes_per_step(tmp_path)
