"""SGLang's diffusion runtime, driven: see driver.py."""
