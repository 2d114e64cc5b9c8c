"""The arguments of `tkernels doctor`."""

import argparse


def add_arguments(parser: argparse.ArgumentParser):
    parser.description = (
        "Say which versions, GPUs and links are here, which runtime and transports would be chosen and why not the "
        "others; then try every verb and every operation on two ranks, with their times. Exit code 1 if something is "
        "broken."
    )
    parser.epilog = "example: tkernels doctor --no-run --json -"
    parser.add_argument("--no-run", action="store_true", help="only say what is here")


def run(arguments: argparse.Namespace) -> int:
    from tkernels import doctor

    return doctor.run(doctor.Options(try_everything=not arguments.no_run, json=arguments.json))
