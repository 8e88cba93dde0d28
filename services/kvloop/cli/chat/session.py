"""The loop of `kvloop chat`: lines in, answers out."""

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from kvloop.cli.chat.conversation import Conversation
from kvloop.cli.chat.lines import turn_line
from kvloop.cli.chat.rendering import Renderer
from kvloop.cli.client import dial, spoken
from kvloop.cli.errors import CommandFailed
from kvloop.client import CallFailed, Session
from kvloop.v1alpha1 import sampling_pb2, turn_pb2

HELP = """\
/new         start a new conversation; what was held for the old one is let go
/fork        go on in a copy; the original's KV serves both
/regenerate  answer the last message again
/leases      what the decode workers hold for this chat
/help        this list
/quit        leave (so does the end of input)
Ctrl-C ends an answer; what was generated so far stays in the conversation."""

# What was generated of an answer that was cut off is history too.
_HOLD = turn_pb2.Retention(hold=True, hold_on_cancel=True)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What stays the same through a chat."""

    sampling: sampling_pb2.SamplingParams
    model: str = ""
    system: str | None = None


class ChatSession:
    """One person's chat. Synchronous outside, so that Ctrl-C reaches an answer and nothing else."""

    def __init__(
        self, router: str, token: str | None, renderer: Renderer, options: ChatOptions, console: Console
    ) -> None:
        self._runner = asyncio.Runner()
        self._renderer = renderer
        self._options = options
        self._console = console
        self._conversation = Conversation(renderer, options.system)
        self._all = [self._conversation]
        self._client = dial(router, token)
        self._sessions: dict[str, Session] = {}
        """By conversation. Open ones keep what is held, however long the next message is thought about."""
        self._actions: dict[str, Callable[[], bool]] = {
            "/new": self._new,
            "/fork": self._fork,
            "/regenerate": self._regenerate,
            "/leases": self._leases,
            "/help": self._help,
            "/quit": lambda: False,
        }

    def run(self) -> None:
        """Serve lines until /quit or the end of input."""
        try:
            for line in self._lines():
                text = line.strip()
                if text and not self._serve(text):
                    break
        finally:
            with contextlib.suppress(CallFailed, KeyboardInterrupt):
                self._runner.run(self._leave())
            self._runner.close()

    def _serve(self, text: str) -> bool:
        """Serve one line; False ends the chat. Expected failures are told and the chat goes on."""
        try:
            with spoken():
                if text.startswith("/"):
                    action = self._actions.get(text)
                    if action is None:
                        self._note(f"no command {text.split(maxsplit=1)[0]}; /help lists them")
                        return True
                    return action()
                self._turn(self._conversation.ask(text))
        except CommandFailed as failure:
            self._note(str(failure), style="red")
        return True

    def _lines(self) -> Iterator[str]:
        if not (sys.stdin.isatty() and self._console.is_terminal):
            yield from sys.stdin
            return
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() editing and history
        while True:
            try:
                yield input("> ")
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._console.print()
                self._note("/quit or Ctrl-D leaves")

    def _turn(self, prompt: list[int]) -> None:
        try:
            self._runner.run(self._answer(prompt))
        except (KeyboardInterrupt, asyncio.CancelledError):
            self._console.print()
            self._note("cancelled")

    async def _answer(self, prompt: list[int]) -> None:
        conversation = self._conversation
        await self._be_there(conversation)
        begun = time.perf_counter()
        events = self._client.turn(
            prompt,
            conversation_id=conversation.id,
            parent_conversation_id=conversation.parent_id,
            sampling=self._options.sampling,
            retention=_HOLD,
            model=self._options.model,
        )
        generated: list[int] = []
        summary: turn_pb2.Summary | None = None
        ttft_s: float | None = None
        try:
            async for event in events:
                if event.token_ids and ttft_s is None:
                    ttft_s = time.perf_counter() - begun
                generated.extend(event.token_ids)
                summary = event.summary or summary
                sys.stdout.write(event.text)
                sys.stdout.flush()
        finally:
            # What was generated is part of the history, also when the answer was cut off: D holds it.
            if generated:
                conversation.answered(prompt, generated)
        sys.stdout.write("\n")
        if summary is not None:
            self._note(turn_line(summary, ttft_s))

    def _new(self) -> bool:
        self._runner.run(self._end(self._conversation))
        self._switch(Conversation(self._renderer, self._options.system))
        self._note(f"new conversation {self._conversation.id}")
        return True

    def _fork(self) -> bool:
        fork = self._conversation.fork()
        self._switch(fork)
        self._note(f"{fork.id}, forked from {fork.parent_id}")
        return True

    def _regenerate(self) -> bool:
        if self._conversation.turns_begun:
            self._turn(self._conversation.prompt)
        else:
            self._note("there is no answer yet")
        return True

    def _leases(self) -> bool:
        table = Table("conversation", "lease", "tokens", "time left", "worker", box=None, pad_edge=False)
        for conversation in self._all:
            lease = self._runner.run(self._client.get(conversation.id, model=self._options.model))
            if lease is not None:
                left = f"{lease.remaining_time.ToTimedelta().total_seconds():.0f} s"
                row = (conversation.id, lease.lease_id, str(lease.num_tokens), left, lease.decode_worker)
                table.add_row(*row)
        if table.row_count:
            self._console.print(table)
        else:
            self._note("nothing is held")
        return True

    def _help(self) -> bool:
        self._note(HELP)
        return True

    def _switch(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._all.append(conversation)

    def _note(self, text: str, style: str = "dim") -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    async def _be_there(self, conversation: Conversation) -> None:
        """Open the conversation's session, if it is not open yet. Raises CallFailed."""
        if conversation.id not in self._sessions:
            session = self._client.session(conversation.id, model=self._options.model)
            self._sessions[conversation.id] = await session.__aenter__()

    async def _end(self, conversation: Conversation) -> None:
        self._all.remove(conversation)
        session = self._sessions.pop(conversation.id, None)
        if session is not None:
            await session.close()

    async def _leave(self) -> None:
        try:
            for conversation in list(self._all):
                await self._end(conversation)
        finally:
            await self._client.close()
