// Runs the entry `probe` of a PTX file on words of memory: `ptx_program FILE GRID BLOCK` reads
// words in hexadecimal and prints what they have become, or the code of what went wrong.

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "driver_api.hpp"

namespace {

void require(CUresult result, const char* call) {
    if (result == CUDA_SUCCESS) return;
    std::printf("%s %d\n", call, int(result));
    std::exit(1);
}

std::string text_of(const char* path) {
    std::string text;
    std::FILE* file = std::fopen(path, "r");
    if (file == nullptr) std::exit(2);
    for (int c; (c = std::fgetc(file)) != EOF;) text += char(c);
    std::fclose(file);
    return text;
}

}  // namespace

int main(int count, char** arguments) {
    if (count < 4) return 2;
    std::vector<unsigned long long> words;
    for (unsigned long long word; std::scanf("%llx", &word) == 1;) words.push_back(word);
    const size_t len_bytes = words.size() * sizeof words[0];
    CUcontext context = nullptr;
    CUmodule module = nullptr;
    CUfunction function = nullptr;
    struct {
        unsigned long long address, count;
    } task{0, words.size()};
    require(cuInit(0), "cuInit");
    require(cuDevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
    require(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    require(cuModuleLoadData(&module, text_of(arguments[1]).c_str()), "cuModuleLoadData");
    require(cuModuleGetFunction(&function, module, "probe"), "cuModuleGetFunction");
    require(cuMemAlloc_v2(&task.address, len_bytes), "cuMemAlloc");
    require(cuMemcpyHtoD_v2(task.address, words.data(), len_bytes), "cuMemcpyHtoD");
    const unsigned grid = unsigned(std::atoi(arguments[2])), block = unsigned(std::atoi(arguments[3]));
    void* params[] = {&task};
    require(cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, nullptr, params, nullptr), "cuLaunchKernel");
    require(cuCtxSynchronize(), "cuCtxSynchronize");
    require(cuMemcpyDtoH_v2(words.data(), task.address, len_bytes), "cuMemcpyDtoH");
    for (unsigned long long word : words) std::printf("%llx\n", word);
    return 0;
}
