"""What is put into an example so that it can be run here: a model for DIR, and free ports for those that it names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.cluster import free_ports

MODEL_FOLDER = re.compile(r"(?<![\w.])(?:/models/[\w.-]+|\.demo/tiny-model|DIR\b)(?!'s)")
NAME_OF_DIR = "DIR's last part"
LOCAL_PORT = re.compile(r"(?<=\b127\.0\.0\.1:)\d{4,5}\b|(?<=\blocalhost:)\d{4,5}\b")
PORT_OPTION = re.compile(r"--([\w-]+-)?port")
SMALL = {"--pd-buffer-size": "16MiB", "--kv-cache-size": "64MiB"}
"""Whatever an example says: the machine that runs the tests has no such memory to give away."""
SHORT = ("--max-model-len", "512")
"""Of an engine: nobody waits for the thousands of words that a model without sense has to say."""


class PutIn:
    """Of one house: the same port is put in for the same number wherever it stands."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self._ports: defaultdict[str, int] = defaultdict(lambda: free_ports(1)[0])

    def port(self, number: str) -> int:
        return self._ports[number]

    def text(self, text: str) -> str:
        text = MODEL_FOLDER.sub(str(self.model), text.replace(NAME_OF_DIR, self.model.name))
        return LOCAL_PORT.sub(lambda found: str(self.port(found[0])), text)

    def words(self, words: Sequence[str]) -> list[str]:
        done = [self.text(word) for word in words]
        for index, option in enumerate(done[:-1]):
            if PORT_OPTION.fullmatch(option):
                done[index + 1] = str(self.port(done[index + 1]))
            done[index + 1] = SMALL.get(option, done[index + 1])
        return done
