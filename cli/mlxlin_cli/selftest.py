"""`mlxlin selftest`: the numbers of this machine against the definition."""

from __future__ import annotations

import click

import mlxlin
from mlxlin_cli.options import debug_option
from mlxlin_cli.terminal import number, say, write

EPILOG = """\b
Examples:
  mlxlin selftest
  mlxlin selftest > selftest.txt; mlxlin info >> selftest.txt     what to send with a report
"""


@click.command("selftest", epilog=EPILOG)
@debug_option
def command() -> None:
    """Check every kernel of this machine against the float64 definition, with times. Exit code 1 if one is wrong."""
    from mlxlin import selftest

    if note := selftest.note():
        say(f"Note: {note}")
    total, wrong = 0, []
    for row in selftest.rows():
        total += 1
        verdict = "ok" if row.ok else f"WRONG: {row.complaint}"
        write(f"{row.kernel:<10} {row.shape:<82} {row.error:9.1e} {number(row.seconds * 1e3):>6} ms  {verdict}\n")
        if not row.ok:
            wrong.append(row.kernel)
    if wrong:
        raise mlxlin.NumericsError(
            f"{len(wrong)} of {total} checks gave wrong numbers: {', '.join(dict.fromkeys(wrong))}.",
            "Please report this output, with that of 'mlxlin info'.",
        )
    write(f"{total} checks, all right\n")
