// A React component that writes a story: the model is loaded once, and leaving the page stops the answer.

import { useEffect, useRef, useState } from "react";
import { type Generation, Starling } from "starling-web";

export function Story({ source, prompt }: { source: string; prompt: string }) {
  const [text, setText] = useState("");
  const [status, setStatus] = useState("Loading");
  const model = useRef<Starling>(null);

  useEffect(() => {
    const abort = new AbortController();
    Starling.load(source, {
      signal: abort.signal,
      onProgress: ({ loaded, total }) => setStatus(`Loading: ${Math.floor((100 * loaded) / total)} %`),
    }).then(
      (loaded) => {
        // the component was removed meanwhile
        if (abort.signal.aborted) return loaded.dispose();
        model.current = loaded;
        setStatus("Ready");
      },
      (e: Error) => abort.signal.aborted || setStatus(e.message),
    );
    return () => {
      abort.abort();
      model.current?.dispose();
      model.current = null;
    };
  }, [source]);

  async function write() {
    if (!model.current) return;
    setStatus("Writing");
    setText("");
    const story: Generation = model.current.generate(prompt, { maxTokens: 8, temperature: 0 });
    try {
      for await (const piece of story) setText((before) => before + piece);
      setStatus((await story.result).finishReason);
    } catch (e) {
      setStatus((e as Error).message);
    }
  }

  return (
    <section>
      <button onClick={write} disabled={status !== "Ready"}>
        Write
      </button>
      <output>{text}</output>
      <p role="status">{status}</p>
    </section>
  );
}
