// What stands for CUDA's libraries where candle opens them and uses nothing of them: handles that
// name nothing. What is left out here is linked by nothing, as the linker says.
extern "C" {

#ifdef LIBRARY_cublas
int cublasCreate_v2(void** handle) {
    static char named;
    *handle = &named;
    return 0;
}

int cublasDestroy_v2(void*) { return 0; }
int cublasSetStream_v2(void*, void*) { return 0; }
#endif

#ifdef LIBRARY_curand
int curandCreateGenerator(void** generator, int) {
    static char named;
    *generator = &named;
    return 0;
}

int curandDestroyGenerator(void*) { return 0; }
int curandSetPseudoRandomGeneratorSeed(void*, unsigned long long) { return 0; }
int curandSetStream(void*, void*) { return 0; }
#endif

#ifdef LIBRARY_cudart
// Functions of the driver that the emulated one has not: 801, "operation not supported".
int cuMemAllocAsync(unsigned long long*, unsigned long, void*) { return 801; }
int cuMemFreeAsync(unsigned long long, void*) { return 801; }
int cuMemcpyPeerAsync(unsigned long long, void*, unsigned long long, void*, unsigned long, void*) { return 801; }
int cuModuleLoad(void**, const char*) { return 801; }
int cuStreamIsCapturing(void*, int*) { return 801; }
#endif

}  // extern "C"
