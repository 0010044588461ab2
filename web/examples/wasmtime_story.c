/* Writes a story with the plain module in wasmtime, from C. With wasmtime's C API (include and lib) in DIR:
 *
 *     cc -std=c11 -O2 -I DIR/include wasmtime_story.c -L DIR/lib -lwasmtime -o story
 *     ./story plain-simd128.wasm model.gguf
 *
 * Prints the events of each step as a line of JSON; host-wasm/README.md documents them. Fuel and a limit of memory keep a
 * model that nobody vouches for in its sandbox.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <wasmtime.h>

#define MEMORY_LIMIT (64 << 20)
#define FUEL 1000000000000
#define PIECE (1 << 20)

static wasmtime_context_t *context;
static wasmtime_instance_t instance;
static wasmtime_memory_t memory;

static void fail(const char *what, const char *message, size_t len) {
    fprintf(stderr, "%s: %.*s\n", what, (int)len, message);
    exit(1);
}

static void check(const char *what, wasmtime_error_t *error, wasm_trap_t *trap) {
    wasm_byte_vec_t message;
    if (error)
        wasmtime_error_message(error, &message);
    else if (trap)
        wasm_trap_message(trap, &message);
    else
        return;
    fail(what, message.data, message.size);
}

static wasmtime_extern_t exported(const char *name) {
    wasmtime_extern_t item;
    if (!wasmtime_instance_export_get(context, &instance, name, strlen(name), &item))
        fail(name, "no such export", 14);
    return item;
}

/* Calls an export. `types` has a letter per argument: i for i32, I for i64. */
static int64_t raw(const char *name, const char *types, const int64_t *args) {
    wasmtime_extern_t function = exported(name);
    wasmtime_val_t values[4], result = {0};
    size_t n = strlen(types);
    for (size_t i = 0; i < n; i++) {
        values[i].kind = types[i] == 'I' ? WASMTIME_I64 : WASMTIME_I32;
        if (types[i] == 'I')
            values[i].of.i64 = args[i];
        else
            values[i].of.i32 = (int32_t)args[i];
    }
    size_t n_results = strcmp(name, "starling_free") != 0;
    wasm_trap_t *trap = NULL;
    check(name, wasmtime_func_call(context, &function.of.func, values, n, &result, n_results, &trap), trap);
    return result.kind == WASMTIME_I64 ? result.of.i64 : result.of.i32;
}

/* A buffer of the module with these bytes; calls free it. */
static int64_t buffer(const void *data, size_t len) {
    int64_t pointer = raw("starling_alloc", "i", (int64_t[]){(int64_t)len}) & 0xffffffff;
    if (!pointer)
        fail("starling_alloc", "no room", 7);
    memcpy(wasmtime_memory_data(context, &memory) + pointer, data, len);
    return pointer;
}

/* The JSON of a reply `{"ok": …}`, until the next call. */
static const char *call(const char *name, const char *types, const int64_t *args) {
    static char *json;
    uint64_t packed = (uint64_t)raw(name, types, args);
    size_t pointer = packed >> 32, len = packed & 0xffffffff;
    json = realloc(json, len + 1);
    if (!json)
        fail(name, "no memory", 9);
    memcpy(json, wasmtime_memory_data(context, &memory) + pointer, len);
    json[len] = 0;
    raw("starling_free", "i", (int64_t[]){(int64_t)pointer});
    if (strncmp(json, "{\"error\"", 8) == 0)
        fail(name, json, len);
    return json;
}

static char *read_file(const char *path, size_t *len) {
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END) != 0)
        fail(path, "cannot be read", 14);
    *len = (size_t)ftell(file);
    rewind(file);
    char *data = malloc(*len);
    if (!data || fread(data, 1, *len, file) != *len)
        fail(path, "cannot be read", 14);
    fclose(file);
    return data;
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "Usage: %s MODULE MODEL\n", argv[0]);
        return 1;
    }
    wasm_config_t *config = wasm_config_new();
    wasmtime_config_consume_fuel_set(config, true);
    wasm_engine_t *engine = wasm_engine_new_with_config(config);
    wasmtime_store_t *store = wasmtime_store_new(engine, NULL, NULL);
    wasmtime_store_limiter(store, MEMORY_LIMIT, -1, -1, -1, -1);
    context = wasmtime_store_context(store);
    check("fuel", wasmtime_context_set_fuel(context, FUEL), NULL);

    size_t len;
    char *code = read_file(argv[1], &len);
    wasmtime_module_t *module;
    check(argv[1], wasmtime_module_new(engine, (const uint8_t *)code, len, &module), NULL);
    free(code);
    wasm_trap_t *trap = NULL;
    check(argv[1], wasmtime_instance_new(context, module, NULL, 0, &instance, &trap), trap);
    memory = exported("memory").of.memory;

    char *model = read_file(argv[2], &len);
    int64_t loader = raw("starling_loader", "Ii", (int64_t[]){(int64_t)len, 0});
    for (size_t at = 0; at < len; at += PIECE) {
        size_t n = len - at < PIECE ? len - at : PIECE;
        call("starling_feed", "ii", (int64_t[]){loader, buffer(model + at, n)});
    }
    free(model);
    int session = 0;
    sscanf(call("starling_open", "ii", (int64_t[]){loader, buffer("{}", 2)}), "{\"ok\":%d}", &session);

    const char *request = "{\"prompt\": \"Once upon a time\", \"max_tokens\": 64, \"sampling\": {\"temperature\": 0}}";
    call("starling_submit", "ii", (int64_t[]){session, buffer(request, strlen(request))});
    const char *step;
    do {
        step = call("starling_step", "i", (int64_t[]){session});
        puts(step);
    } while (!strstr(step, "\"type\":\"done\""));
    wasmtime_module_delete(module);
    wasmtime_store_delete(store);
    wasm_engine_delete(engine);
    return 0;
}
