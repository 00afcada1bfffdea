class CompilationCounter:
    num_cudagraph_captured = 0


compilation_counter = CompilationCounter()
