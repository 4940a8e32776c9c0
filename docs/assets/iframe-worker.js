// Browsers start no workers from files. There the search's worker runs in a frame, so that a built site can be
// searched from the disk. The theme asks whether there is an `IFrameWorker`.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const name = `__worker${document.querySelectorAll("iframe").length}`;
      window[name] = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc =
        `<script>self.postMessage = (data) => parent["${name}"](data)</script>` +
        `<script src="${new URL(url, location)}"></script>`;
      this.loaded = new Promise((resolve) => this.frame.addEventListener("load", resolve));
      const attach = () => document.body.appendChild(this.frame);
      document.body ? attach() : addEventListener("DOMContentLoaded", attach);
    }

    postMessage(data) {
      this.loaded.then(() => {
        const inner = this.frame.contentWindow;
        inner.dispatchEvent(new inner.MessageEvent("message", { data }));
      });
    }

    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
