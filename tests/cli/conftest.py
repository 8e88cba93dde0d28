"""Fixtures of the commands' tests: a small tokenizer, `kvloop` as a process, proof that nothing stays."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

WAIT_S = 60.0
_POLL_S = 0.02

TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }} {{ message['content'] | trim }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant {% endif %}"
)


def until(condition: Callable[[], bool], what: str) -> None:
    """Poll until a condition holds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {WAIT_S:.0f} s in vain: {what}")
        time.sleep(_POLL_S)


@dataclass
class Running:
    """A kvloop command as a process of its own."""

    process: "subprocess.Popen[str]"
    out: Path
    descendants: dict[int, psutil.Process] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return self.process.pid

    def text(self) -> str:
        return self.out.read_text(encoding="utf-8")

    def wait_for(self, text: str) -> None:
        """Wait until the output holds a text; the children there are then are remembered."""
        self.wait_for_match(re.escape(text))
        self.look()

    def wait_for_match(self, pattern: str) -> None:
        """Wait until the output matches."""

        def seen() -> bool:
            if re.search(pattern, self.text(), re.MULTILINE):
                return True
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.text()}"
            return False

        until(seen, f"{pattern!r} in the output")

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something that the command brings about; the children there are then are remembered."""
        until(condition, what)
        self.look()

    def look(self) -> None:
        """Remember the processes that there are under the command now."""
        for process in psutil.Process(self.pid).children(recursive=True):
            self.descendants[process.pid] = process

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(WAIT_S)

    def assert_nothing_remains(self) -> None:
        """Wait until every process seen under the command is gone."""
        assert self.descendants, "no child was ever seen"

        def gone() -> bool:
            return not any(_lives(process) for process in self.descendants.values())

        until(gone, "children to end")


def _lives(process: psutil.Process) -> bool:
    try:
        # Whoever adopts the orphans here may be slow to reap them.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


Start = Callable[..., Running]


@pytest.fixture
def kvloop(tmp_path: Path) -> Iterator[Start]:
    """Start `kvloop ARGUMENT...` with output in a file; whatever is left at the end is killed."""
    started: list[Running] = []

    def start(
        *arguments: str,
        stdin: str | None = None,
        environment: dict[str, str] | None = None,
        piped: bool = False,
    ) -> Running:
        out = tmp_path / f"out-{len(started)}.txt"
        with out.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvloop.cli.main", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if piped else output,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=tmp_path,
                env={**clean_environment(), "PYTHONUNBUFFERED": "1", **(environment or {})},
            )
        running = Running(process, out)
        started.append(running)
        if stdin is not None:
            assert process.stdin is not None
            process.stdin.write(stdin)
            process.stdin.close()
        return running

    yield start
    for running in started:
        if running.process.poll() is None:
            running.look()
            running.process.send_signal(signal.SIGKILL)
            running.process.wait(WAIT_S)
        if running.process.stdin is not None:
            running.process.stdin.close()
        for process in running.descendants.values():
            if _lives(process):
                process.kill()


def clean_environment() -> dict[str, str]:
    """Return our environment without the settings of whoever runs the tests."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVLOOP_")}


@pytest.fixture
def no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take KVLOOP_ settings out of the environment."""
    for name in list(os.environ):
        if name.startswith("KVLOOP_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a chat template: bytes as tokens, and two special ones for turns."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|pad|>", "<|turn|>", "<|end|>"]
    vocabulary = {text: index for index, text in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def ids_of(text: str, tokenizer_folder: Path) -> Sequence[int]:
    from tokenizers import Tokenizer

    return list(Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json")).encode(text).ids)
