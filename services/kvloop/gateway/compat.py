"""Everything that the gateway takes from vLLM, and what differs between its versions (checked on 0.29.0).

vLLM's serving code runs over any EngineClient. It needs a model's configuration, tokenizer and chat
template, no weights and no GPU. vllm is imported on first use: it takes seconds, and a settings error should
not.
"""

import functools
import json
import logging
import os
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from kvloop.gateway import problems
from kvloop.gateway.problems import Problem
from kvloop.gateway.settings import GatewaySettings
from kvloop.runtime import logs
from kvloop.runtime.errors import Failure, Reason, invalid
from kvloop.v1alpha1 import turn_pb2

_log = logs.get("gateway")

TASKS = ("generate",)
_DATA = "data: "
_DONE = "[DONE]"
# They log tracebacks of refused requests and of answers that don't parse, with what was asked and answered.
_LOGS_OF_TEXTS = ("vllm.entrypoints", "vllm.tool_parsers", "vllm.parser", "vllm.reasoning")


@dataclass(frozen=True, slots=True)
class Base:
    """What vLLM derives from the arguments: the parts that an EngineClient must have."""

    args: Any
    vllm_config: Any
    renderer: Any
    input_processor: Any


def prepare_environment(settings: GatewaySettings) -> None:
    """Set what vLLM reads from the environment when it is imported; the user's own choices stand."""
    os.environ.update({"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"})
    # Routes and stores that belong to an engine of one's own.
    for name in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_API_KEY"):
        os.environ.pop(name, None)
    os.environ["VLLM_ENABLE_RESPONSES_API_STORE"] = "0"
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    for name in _LOGS_OF_TEXTS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Connectors and engine hooks are other processes' affair.
    os.environ.setdefault("VLLM_PLUGINS", "")
    if Path(settings.model_path).exists():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")


def arguments(settings: GatewaySettings) -> list[str]:
    """Return the arguments of `vllm serve` that make its API server what the settings say."""
    given = ["--model", settings.model_path, "--served-model-name", settings.model_name]
    given += ["--enable-prompt-tokens-details", "--disable-log-stats", "--disable-uvicorn-access-log"]
    # The gateway computes nothing; this spares the checks of accelerators and of cache space.
    given += ["--enforce-eager"]
    if settings.revision is not None:
        given += ["--revision", settings.revision]
    if settings.max_model_len is not None:
        given += ["--max-model-len", str(settings.max_model_len)]
    if settings.tool_parser is not None:
        given += ["--enable-auto-tool-choice", "--tool-call-parser", settings.tool_parser]
    if settings.reasoning_parser is not None:
        given += ["--reasoning-parser", settings.reasoning_parser]
    if settings.chat_template is not None:
        given += ["--chat-template", str(settings.chat_template)]
    return [*given, *settings.vllm_args]


def load(settings: GatewaySettings) -> Base:
    """Read the model's configuration and tokenizer. Raises ValueError or OSError when they are not there."""
    prepare_environment(settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.renderers import renderer_from_config
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.input_processor import InputProcessor

        args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments(settings))
        validate_parsed_serve_args(args)
        vllm_config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        renderer = renderer_from_config(vllm_config)
        return Base(args, vllm_config, renderer, InputProcessor(vllm_config, renderer))


async def build_app(base: Base, client: Any, adapters: Sequence[str]) -> Any:
    """Return vLLM's own ASGI app over a client."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fastapi.exceptions import RequestValidationError
        from starlette.responses import JSONResponse
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app as build
        from vllm.lora.request import LoRARequest

        app = build(base.args, TASKS, base.vllm_config.model_config)
        await init_app_state(client, app.state, base.args, TASKS)

    async def refuse(_request: Any, error: Any) -> Any:
        problem = validation_problem(error.errors())
        return JSONResponse(problem.body(), status_code=problem.status)

    # vLLM's own handler repeats the client's whole input in the error.
    app.exception_handler(RequestValidationError)(refuse)
    # vLLM has built its stack by now; the next request builds it anew.
    app.middleware_stack = None
    for number, name in enumerate(adapters, start=1):
        app.state.openai_serving_models.lora_requests[name] = LoRARequest(name, number, name)
    return app


def with_cors(app: Any, base: Base) -> Any:
    """Return an app whose answers, refusals included, a browser may read where vLLM's own would let it."""
    from starlette.middleware.cors import CORSMiddleware

    args = base.args
    return CORSMiddleware(
        app,
        allow_origins=args.allowed_origins,
        allow_credentials=args.allow_credentials,
        allow_methods=args.allowed_methods,
        allow_headers=args.allowed_headers,
    )


class Refused(Exception):
    """A chat that vLLM's serving code does not take."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class ChatServing:
    """vLLM's serving of chats, without HTTP."""

    def __init__(self, app: Any, base: Base) -> None:
        """Take the app that build_app made."""
        self._serving = app.state.openai_serving_chat
        self._models = app.state.openai_serving_models
        self.vocab_size: int = base.vllm_config.model_config.get_vocab_size()

    def adapter_of(self, model: str) -> str:
        """Return the adapter that a model's name means, "" for the model itself. Failure MODEL_NOT_FOUND."""
        if not model or self._models.is_base_model(model):
            return ""
        if model not in self._models.lora_requests:
            raise Failure(
                Reason.ERROR_REASON_MODEL_NOT_FOUND, "no model or adapter has this name", field="model"
            )
        return model

    async def stream(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a streamed chat completion. Raises Refused."""
        from pydantic import ValidationError
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        try:
            request = ChatCompletionRequest.model_validate(body)
            events = await self._serving.create_chat_completion(request)
        except ValidationError as error:
            raise Refused(validation_problem(error.errors())) from None
        except Exception as error:  # noqa: BLE001 - vLLM's refusals have no common base
            raise Refused(problem_of(error)) from None
        if not hasattr(events, "__aiter__"):
            told = events.error
            raise Refused(Problem(int(told.code), told.message, told.param))
        try:
            async for event in events:
                # JSON leaves the other ends of lines that Unicode knows as they are.
                for line in event.split("\n"):
                    if line.startswith(_DATA) and not line.endswith(_DONE):
                        yield json.loads(line[len(_DATA) :])
        finally:
            await events.aclose()


def validation_problem(errors: Sequence[Any]) -> Problem:
    """Return the problem of a body that does not fit its schema, without the input that was given."""
    first = errors[0] if errors else None
    if not isinstance(first, Mapping):
        return Problem(int(HTTPStatus.BAD_REQUEST), str(first) if first else "the request is not valid")
    # Branches of unions are told apart by names in brackets or of types; only fields mean something outside.
    path = [str(part) for part in first.get("loc", ()) if not set(str(part)) & set("[](){}")]
    named = ".".join(path[1:] if path[:1] == ["body"] else path)
    text = str(first.get("msg", "is not valid")).removeprefix("Value error, ")
    cause = (first.get("ctx") or {}).get("error")
    param = getattr(cause, "parameter", None) or named or None
    if isinstance(cause, Exception) and cause.args:
        text = str(cause.args[0])
    elif isinstance(cause, str):
        text = f"{text}: {cause}"
    return Problem(int(HTTPStatus.BAD_REQUEST), f"{named}: {text}" if named else text, param)


def problem_of(error: Exception) -> Problem:
    """Return the problem that one of vLLM's exceptions is, as vLLM's own handlers would answer it."""
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

    response = create_error_response(error).error
    if response.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        # Nobody wrote its text for a client: it may be a piece of a prompt.
        _log.error("unexpected_failure", error=type(error).__name__)
        return Problem(int(response.code), problems.UNEXPECTED)
    return Problem(int(response.code), response.message, response.param)


def http_error(problem: Problem) -> Exception:
    """Return the exception by which vLLM's serving code answers with a status of our choice."""
    from vllm.exceptions import GracefulHTTPError, VLLMValidationError

    if problem.status == HTTPStatus.BAD_REQUEST:
        error: Exception = VLLMValidationError(problem.message, parameter=problem.param)
    else:
        error = GracefulHTTPError(problem.message, HTTPStatus(problem.status))
    return error


def dead_error() -> BaseException:
    """Return what vLLM's health check takes for "can't serve"."""
    from vllm.v1.engine.exceptions import EngineDeadError

    error: BaseException = EngineDeadError()
    return error


def make_client_class(methods: type) -> type:
    """Return a concrete EngineClient from a class that has the methods that matter.

    What else the version at hand declares abstract (sleep, profiles, weights, caches) belongs to an engine
    of one's own and is refused.
    """
    from vllm.engine.protocol import EngineClient

    def refuse(name: str) -> Callable[..., Awaitable[Any]]:
        async def refused(*_args: Any, **_kwargs: Any) -> Any:
            raise NotImplementedError(f"{name} is not served by a gateway")

        return refused

    missing = {name: refuse(name) for name in EngineClient.__abstractmethods__ if not hasattr(methods, name)}
    return type(methods.__name__, (methods, EngineClient), missing)


class _Classes(NamedTuple):
    """What is made of every chunk: looked up once, an import statement at every chunk would show."""

    completion_output: Any
    request_output: Any
    logprob: Any
    delta: Any


@functools.cache
def _classes() -> _Classes:
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import RequestOutputKind

    return _Classes(CompletionOutput, RequestOutput, Logprob, RequestOutputKind.DELTA)


def wants_deltas(params: Any) -> bool:
    """Return whether the serving code wants each output to hold only what is new."""
    return bool(params.output_kind == _classes().delta)


def logprobs_of(position: turn_pb2.PositionLogprobs) -> dict[int, Any]:
    """Return vLLM's form of one position: a dict by token id, the chosen token first."""
    make = _classes().logprob
    return {
        candidate.token_id: make(
            logprob=candidate.logprob,
            rank=candidate.rank,
            decoded_token=candidate.decoded_token if candidate.HasField("decoded_token") else None,
        )
        for candidate in position.candidates
    }


def completion_output(**values: Any) -> Any:
    """Return vLLM's CompletionOutput."""
    return _classes().completion_output(**values)


def request_output(**values: Any) -> Any:
    """Return vLLM's RequestOutput. It never carries kv_transfer_params: those would reach the client."""
    return _classes().request_output(prompt=None, **values)


def prompt_ids(prompt: Any) -> list[int]:
    """Return the token ids of a rendered prompt. Failure INVALID_FIELD for anything but tokens."""
    kind = prompt.get("type") if isinstance(prompt, Mapping) else None
    if kind != "token":
        raise invalid("prompt", "only text and token ids are served")
    ids: list[int] = prompt["prompt_token_ids"]
    return ids


def check_inputs(base: Any, request_id: str, prompt: Any, params: Any, *, rendered: bool) -> None:
    """Have vLLM refuse what an engine would refuse, as vLLM's own exceptions.

    base: has input_processor and model_config. rendered: the ids come from the tokenizer and from models, so
    that none has to be looked at; vLLM walks over all of them twice.
    """
    ids = prompt["prompt_token_ids"]
    if rendered and 0 < len(ids) < base.model_config.max_model_len:
        prompt = {**prompt, "prompt_token_ids": ids[-1:]}
    base.input_processor.process_inputs(request_id, prompt, params, TASKS)
