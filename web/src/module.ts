// What can be seen of the engine's module before it has an instance.

/** Whether a module imports its memory, which threads share. */
export const importsMemory = (module: WebAssembly.Module) =>
  WebAssembly.Module.imports(module).some(({ kind }) => kind === "memory");

/** Whether a module has 64-bit addresses. */
export const isMemory64 = (module: WebAssembly.Module) =>
  WebAssembly.Module.exports(module).some(({ name }) => name === "memory64");
