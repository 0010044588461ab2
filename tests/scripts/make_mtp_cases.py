#!/usr/bin/env python3
"""Writes fixtures/mtp: the logits of llama.cpp's MTP heads (multi-token prediction, NextN).

    pip install llama-cpp-python numpy
    cargo run --release -p starling-tests --example nextn_models DIRECTORY
    tests/scripts/make_mtp_cases.py DIRECTORY

For each model of the directory, the first prompt of its recipe: row i has the logits of token i + 1 and the model's hidden
state of token i, (tokens - 1, n_vocab), little-endian f32, with f32 keys and values.
"""

import ctypes
import json
import pathlib
import sys

import llama_cpp.llama_cpp as lib
import numpy

FIXTURES = pathlib.Path(__file__).parents[2] / "fixtures"
F32 = 0
MTP = 1


def function(name, result, *arguments):
    """A function of llama.cpp that the package has no binding for."""
    found = getattr(lib._lib, name)
    found.restype, found.argtypes = result, arguments
    return found


FLOATS = ctypes.POINTER(ctypes.c_float)
POINTER, INT = ctypes.c_void_p, ctypes.c_int32


class Embd(ctypes.Structure):
    _fields_ = [("data", FLOATS), ("n_rows", ctypes.c_size_t), ("n_embd", ctypes.c_size_t)]


# two of llama-ext.h, which is C++, then those of batches of llama.h
output_hidden = function("_Z26llama_set_embeddings_nextnP13llama_contextbb", None, POINTER, ctypes.c_bool, ctypes.c_bool)
hidden_states = function("_Z26llama_get_embeddings_nextnP13llama_context", FLOATS, POINTER)
new_batch = function("llama_batch_ext_init", POINTER, POINTER)
add_token = function("llama_batch_ext_add_token", INT, POINTER, INT, INT)
set_hidden = function("llama_batch_ext_set_embd_token", ctypes.c_bool, POINTER, INT, Embd)
set_position = function("llama_batch_ext_set_pos", ctypes.c_bool, POINTER, INT, ctypes.POINTER(INT))
set_output = function("llama_batch_ext_set_output_logits", ctypes.c_bool, POINTER, INT, ctypes.c_bool)
process = function("llama_process", INT, POINTER, ctypes.c_int, POINTER)


# must outlive the library's use
QUIET = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)


def context(model, kind):
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 512, 512, 512
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = F32
    params.flash_attn_type = 0  # computes in f16
    params.ctx_type = kind
    return lib.llama_init_from_model(model, params)


def run(context, tokens, hidden=None):
    batch, states = new_batch(context), []
    for i, token in enumerate(tokens):
        at = add_token(batch, 0, token)
        assert at == i, at
        if hidden is not None:
            row = numpy.ascontiguousarray(hidden[i])
            states.append(row)
            embd = Embd(row.ctypes.data_as(FLOATS), 1, row.size)
            assert set_hidden(batch, at, embd)
        position = INT(i)
        assert set_position(batch, at, ctypes.byref(position))
        assert set_output(batch, at, True)
    code = process(context, 1, batch)
    assert code == 0, code


def main():
    lib.llama_log_set(QUIET, None)
    lib.llama_backend_init()
    for path in sorted(pathlib.Path(sys.argv[1]).glob("*.gguf")):
        tokens = json.loads((FIXTURES / "architectures" / f"{path.stem}.json").read_text())["prompts"][0]
        params = lib.llama_model_default_params()
        params.load_mtp, params.use_extra_bufts = True, False
        model = lib.llama_model_load_from_file(str(path).encode(), params)
        n_embd = lib.llama_model_n_embd(model)
        n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        target = context(model, 0)
        output_hidden(target, True, False)
        run(target, tokens)
        hidden = numpy.ctypeslib.as_array(hidden_states(target), (len(tokens), n_embd)).copy()
        head = context(model, MTP)
        output_hidden(head, True, True)
        run(head, tokens[1:], hidden[:-1])
        logits = numpy.ctypeslib.as_array(lib.llama_get_logits(head), (len(tokens) - 1, n_vocab))
        (FIXTURES / "mtp").mkdir(exist_ok=True)
        logits.astype("<f4").tofile(FIXTURES / "mtp" / f"{path.stem}.f32")
        print(path.stem, logits.shape, float(abs(logits).max()))


if __name__ == "__main__":
    main()
