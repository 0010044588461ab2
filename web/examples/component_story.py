"""Writes a story with the component in wasmtime: pip install wasmtime; python3 component_story.py COMPONENT MODEL"""

import json
import sys
from pathlib import Path

from wasmtime import Engine, Store
from wasmtime.component import Component, Linker, Record

INTERFACE = "starling:engine/models@0.1.0"
PIECE = 1 << 18


class Models:
    """The functions of the interface; host-wasm/component/wit/starling.wit says what they are."""

    def __init__(self, component_path):
        engine = Engine()
        self.store = Store(engine)
        component = Component.from_file(engine, component_path)
        self.instance = Linker(engine).instantiate(self.store, component)
        self.interface = self.instance.get_export_index(self.store, INTERFACE)

    def call(self, name, *args):
        function = self.instance.get_func(self.store, self.instance.get_export_index(self.store, name, self.interface))
        result = function(self.store, *args)
        function.post_return(self.store)
        if isinstance(result, Record) and hasattr(result, "kind"):
            raise RuntimeError(f"{result.kind}: {result.message}")
        return result


def story(component_path, model_path):
    models = Models(component_path)
    file = Path(model_path).read_bytes()
    loader = models.call("[constructor]loader", [len(file)], False)
    for at in range(0, len(file), PIECE):
        models.call("[method]loader.feed", loader, 0, file[at : at + PIECE])
    model = models.call("[static]loader.open", loader, "{}")
    request = {"prompt": "Once upon a time", "max_tokens": 64, "sampling": {"temperature": 0}}
    models.call("[method]model.submit", model, json.dumps(request))
    text = ""
    while True:
        _, events = models.call("[method]model.step", model)
        for event in events:
            text += getattr(event.payload, "text", "")
            if event.tag == "done":
                isa = json.loads(models.call("[method]model.info", model))["isa"]
                model.drop(models.store)
                return {"text": text, "isa": isa}


if __name__ == "__main__":
    print(json.dumps(story(*sys.argv[1:])))
