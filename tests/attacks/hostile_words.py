"""Raises an error whose class, text, notes and cause would be obeyed by a terminal, a page, a table or a runner, if they came there."""

# attacks: optimizer.plain

import wrong
from wrong import *  # noqa: F403

WORDS = "=cmd|'/c calc'!A1\n```\n</pre><script>alert(1)</script>\x1b[2J\x1b]0;x\x07\ud800\u202e{0} %s ]]>\0|\r\n::error::x\n"
Evil = type("\x1b[31m<b>Evil</b>\n=1+1", (Exception,), {})


class ZeroOptimizer(wrong.ZeroOptimizer):
    def step(self):
        error = Evil(WORDS + "A" * 5_000_000)
        error.__notes__ = [WORDS]
        raise error from ValueError(WORDS)
