"""vllm-router's process, from its unpacked wheel.

    PYTHONPATH=FOLDER python -m kvloop.bench.peers_router ARGUMENTS OF vllm-router

Its own launcher imports a balancer for debugging as well, whose packages its Rust router does not need.
"""

import argparse
import importlib


def main() -> None:
    """Run it until it is ended."""
    settings = importlib.import_module("vllm_router.router_args").RouterArgs
    router = importlib.import_module("vllm_router.router").Router
    parser = argparse.ArgumentParser()
    settings.add_cli_args(parser, use_router_prefix=False)
    router.from_args(settings.from_cli_args(parser.parse_args(), use_router_prefix=False)).start()


if __name__ == "__main__":
    main()
