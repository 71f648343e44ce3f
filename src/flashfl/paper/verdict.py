"""Whether runs show the paper's story: methods that agree on a sensitivity-aware mask end above those that do not."""

from __future__ import annotations

from collections.abc import Mapping

from ..run.summary import ACCURACY, Summary

_SAID = {  # how two methods stand: the beginning of the sentence, and the words between their names
    "above": ("As in the paper,", "is above"),
    "below": ("Unlike in the paper, on this task and these seeds", "is not above"),
    "spread": ("Too close to tell, as the difference is within the spread over seeds:", "against"),
    "seed": ("One seed cannot tell whether this is as in the paper:", "against"),
}


def verdict(found: Mapping[str, Summary]) -> str:
    """How spdst and jmwst stand against pdst and nst. Only methods that were run are named."""
    accuracy = {name: 100 * s.accuracy for name, s in found.items() if s.accuracy is not None and s.metric == ACCURACY}
    ours = [n for n in ("spdst", "jmwst") if n in accuracy]
    theirs = [n for n in ("pdst", "nst") if n in accuracy]
    pairs: dict[str, list[str]] = {}
    for a, b in ((a, b) for a in ours for b in theirs):
        how = _standing(found[a], found[b])
        values = [f"{n} ({accuracy[n]:.2f})" for n in (a, b)]
        pairs.setdefault(how, []).append(f" {_SAID[how][1]} ".join(values))
    if list(pairs) == ["above"]:
        which, end = ("methods", "end") if len(ours) > 1 else ("a method", "ends")
        sharing = f"{which} whose clients share a mask with measured layer densities ({', '.join(ours)})"
        return f"As in the paper, {sharing} {end} above {' and '.join(theirs)}."
    return " ".join(f"{_SAID[how][0]} {'; '.join(said)}." for how, said in pairs.items())


def _standing(a: Summary, b: Summary) -> str:
    """One method is above another if their ranges, mean ± spread, do not overlap."""
    if a.std is None or b.std is None or a.accuracy is None or b.accuracy is None:
        return "seed"
    apart = a.accuracy - b.accuracy
    return "spread" if abs(apart) <= a.std + b.std else "above" if apart > 0 else "below"
