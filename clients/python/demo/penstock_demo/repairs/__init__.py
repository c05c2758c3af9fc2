"""The demo with a real agent: mini-SWE-agent repairs small repositories (`penstock demo --agent mini-swe-agent`)."""
