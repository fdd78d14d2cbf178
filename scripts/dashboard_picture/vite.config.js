import react from "@vitejs/plugin-react";
import { defineConfig } from "vite";

// public/ holds dashboard.json and Grafana's icons; /api goes to Prometheus.
const proxy = { "/api": process.env.PROMETHEUS ?? "http://127.0.0.1:19090" };

export default defineConfig({
  plugins: [react()],
  define: { "process.env.NODE_ENV": '"production"', global: "globalThis" },
  build: { target: "esnext", chunkSizeWarningLimit: 20000, reportCompressedSize: false, sourcemap: false, minify: false },
  preview: { host: "127.0.0.1", port: 18556, proxy },
});
