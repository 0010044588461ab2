"""Writes a story with the plain module in wasmtime: pip install wasmtime; python3 wasmtime_story.py MODULE MODEL

Fuel and a limit of memory keep a model that nobody vouches for in its sandbox.
"""

import json
import sys
from pathlib import Path

from wasmtime import Config, Engine, Instance, Module, Store

MEMORY_LIMIT = 64 << 20
FUEL = 10**12
PIECE = 1 << 20


class Starling:
    """The exports of the module; host-wasm/README.md documents them."""

    def __init__(self, module_path):
        config = Config()
        config.consume_fuel = True
        engine = Engine(config)
        self.store = Store(engine)
        self.store.set_limits(memory_size=MEMORY_LIMIT)
        self.store.set_fuel(FUEL)
        self.exports = Instance(self.store, Module.from_file(engine, module_path), []).exports(self.store)
        self.memory = self.exports["memory"]

    def raw(self, name, *args):
        return self.exports[name](self.store, *args)

    def buffer(self, data):
        data = data.encode() if isinstance(data, str) else data
        pointer = self.raw("starling_alloc", len(data)) & 0xFFFFFFFF
        if pointer == 0:
            raise MemoryError(f"no room for {len(data)} bytes")
        self.memory.write(self.store, data, pointer)
        return pointer

    def call(self, name, *args):
        packed = self.raw(name, *args) & 0xFFFFFFFFFFFFFFFF
        pointer, length = packed >> 32, packed & 0xFFFFFFFF
        reply = json.loads(bytes(self.memory.read(self.store, pointer, pointer + length)))
        self.raw("starling_free", pointer)
        if "error" in reply:
            raise RuntimeError("{kind}: {message}".format(**reply["error"]))
        return reply["ok"]


def story(module_path, model_path):
    starling = Starling(module_path)
    model = Path(model_path).read_bytes()
    loader = starling.raw("starling_loader", len(model), 0)
    for at in range(0, len(model), PIECE):
        starling.call("starling_feed", loader, starling.buffer(model[at : at + PIECE]))
    session = starling.call("starling_open", loader, starling.buffer("{}"))
    request = {"prompt": "Once upon a time", "max_tokens": 64, "sampling": {"temperature": 0}}
    starling.call("starling_submit", session, starling.buffer(json.dumps(request)))
    text = ""
    while True:
        for event in starling.call("starling_step", session)["events"]:
            text += event.get("text", "")
            if event["type"] == "done":
                return {"text": text, "isa": starling.call("starling_info", session)["isa"]}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__.strip())
    print(json.dumps(story(*sys.argv[1:])))
