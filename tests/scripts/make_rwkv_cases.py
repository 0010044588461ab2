#!/usr/bin/env python3
"""Writes fixtures/tokenizer/rwkv.json: ids of the RWKV tokenizer for the texts of pretokenizer.json, and the tokens of the
vocabulary `rwkv_vocab_v20230424` that occur in these texts, spelled as in GGUF files.

    pip install --no-deps rwkv==0.8.32
    python3 tests/scripts/make_rwkv_cases.py > fixtures/tokenizer/rwkv.json
"""

import importlib.util
import json
import pathlib
import sys

# the package itself needs PyTorch, its tokenizer does not
package = pathlib.Path(importlib.util.find_spec("rwkv").submodule_search_locations[0])
spec = importlib.util.spec_from_file_location("rwkv_tokenizer", package / "rwkv_tokenizer.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
tokenizer = module.TRIE_TOKENIZER(str(package / "rwkv_vocab_v20230424.txt"))

fixtures = pathlib.Path(__file__).parents[2] / "fixtures" / "tokenizer"
texts = json.loads((fixtures / "pretokenizer.json").read_text())["texts"]
whole = [text.encode() for text in texts]
tokens = {id: token for id, token in tokenizer.idx2token.items() if any(token in text for text in whole)}
cases = {
    "tokens": [[id, repr(token)[2:-1]] for id, token in tokens.items()],
    "ids": [tokenizer.encode(text) for text in texts],
}
json.dump(cases, sys.stdout, separators=(",", ":"))
print()
