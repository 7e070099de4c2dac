"""Prints what the plans for the modelled machines say to each published comparison.

python -m tests.published.table > tests/published/table.txt
"""

from __future__ import annotations

from collections import Counter

from tests.published.cases import (
    CASES,
    NOT_FORMED,
    SINGLE_ENV_CASES,
    machines_of,
    published_rows,
    rate,
)


def main() -> None:
    rows = published_rows()
    agreed: dict[str, bool] = {}
    print("row  machine               published                          predicted  agrees")
    for case in (*CASES, *SINGLE_ENV_CASES):
        published = rows[case.row]["winner"] if case in CASES else "1 env: the loop (its note)"
        for name in machines_of(case):
            ratio = rate(case, name, case.faster) / rate(case, name, case.slower)
            agrees = ratio > 1
            if case in CASES:
                agreed[case.row] = agreed.get(case.row, True) and agrees
            answer = "yes" if agrees else "no"
            print(f"{case.row:<5}{name:<22}{published[:33]:<35}{ratio:8.2f} x  {answer}")
    print(f"\n{sum(agreed.values())} of {len(agreed)} rows agree, on every machine they may mean.")
    print("\nWhat the rows leave open, and what was taken:")
    for case in CASES:
        print(f"  {case.row}: {case.left_open}")
    print(f"\n{len(NOT_FORMED)} rows are not formed:")
    for reason, count in Counter(NOT_FORMED.values()).most_common():
        names = ", ".join(row for row, why in NOT_FORMED.items() if why == reason)
        print(f"  {count:>2}  {reason}: {names}")


if __name__ == "__main__":
    main()
