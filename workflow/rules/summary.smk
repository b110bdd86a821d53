import os
import sys

from stages.summary import summarize


def show_summary():
    if lines := summarize(os.getpid()):
        print(f"\n{lines}\n", file=sys.stderr)


onsuccess:
    show_summary()


onerror:
    show_summary()
