// Which kernels a PTX text holds, and whether a driver of this version would take it.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unordered_map>

#include "machine.hpp"
#include "ptx_program.hpp"

namespace emulator {
namespace {

struct Version {
    int major, minor;
};

// The newest PTX version that a driver reads; from NVIDIA's table of PTX releases.
Version newest_ptx(int driver_version) {
    const int major = driver_version / 1000, minor = driver_version % 1000 / 10;
    if (major == 11) return {7, minor};
    if (major == 12 && minor <= 5) return {8, minor};
    if (major == 12 && minor == 6) return {8, 5};
    if (major == 12) return {8, minor - 1};  // 12.8 reads 8.7, 12.9 reads 8.8
    if (major == 13) return {9, minor};
    return major < 11 ? Version{6, 5} : Version{9, 9};
}

// The text behind `directive` where it begins a line, or null.
const char* find_directive(const char* text, const char* directive) {
    const std::size_t length = std::strlen(directive);
    for (const char* at = text; (at = std::strstr(at, directive)) != nullptr; at += length)
        if (at == text || at[-1] == '\n') return at + length;
    return nullptr;
}

std::string word_at(const char* text) {
    text += std::strspn(text, " \t");
    return std::string(text, std::strcspn(text, " \t\r\n(,;"));
}

// Bytes of the entry's only parameter, `.param .align 8 .b8 NAME_param_0[4096]`; 0 if it is not an
// array of bytes.
std::size_t declared_argument_bytes(const char* entry, const std::string& name) {
    const std::string parameter = name + "_param_0[";
    const char* at = std::strstr(entry, parameter.c_str());
    const char* end = std::strchr(entry, ')');
    return at == nullptr || end == nullptr || at > end ? 0 : std::strtoull(at + parameter.size(), nullptr, 10);
}

CUresult check_header(const char* ptx) {
    const char* version = find_directive(ptx, ".version");
    const char* target = find_directive(ptx, ".target");
    if (version == nullptr || target == nullptr) {
        complain("a module without .version and .target is not PTX; nothing else can be loaded");
        return CUDA_ERROR_INVALID_IMAGE;
    }
    char* rest = nullptr;
    const int major = int(std::strtol(version, &rest, 10));
    const int minor = *rest == '.' ? int(std::strtol(rest + 1, nullptr, 10)) : 0;
    const Version newest = newest_ptx(settings().driver_version);
    if (major > newest.major || (major == newest.major && minor > newest.minor)) {
        complain("PTX " + std::to_string(major) + "." + std::to_string(minor) + ": this driver reads no newer than " +
                 std::to_string(newest.major) + "." + std::to_string(newest.minor));
        return CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
    }
    const char* chip = std::strstr(target, "sm_");
    if (chip == nullptr) return CUDA_ERROR_INVALID_PTX;
    return std::atoi(chip + 3) <= settings().compute_capability ? CUDA_SUCCESS : CUDA_ERROR_NO_BINARY_FOR_GPU;
}

CUresult complain_of(const ptx::Refusal& refusal) {
    complain("PTX line " + std::to_string(refusal.line) + ": " + refusal.text);
    return CUDA_ERROR_INVALID_PTX;
}

// The text of FUSESTEP_PTX_INSTEAD, which is loaded in place of a module whose first entry it has:
// that is how mutants are run.
std::string text_instead(const char* ptx) {
    const char* path = std::getenv("FUSESTEP_PTX_INSTEAD");
    std::FILE* file = path == nullptr ? nullptr : std::fopen(path, "r");
    if (file == nullptr) return ptx;
    std::string text;
    char part[65536];
    for (std::size_t length; (length = std::fread(part, 1, sizeof part, file)) != 0;) text.append(part, length);
    std::fclose(file);
    const char* first = find_directive(ptx, ".visible .entry");
    const bool has_first = first != nullptr && text.find(".visible .entry " + word_at(first) + "(") != std::string::npos;
    return has_first ? text : ptx;
}

// Programs load a module for every backend; its text is read once.
CUresult read_entries(const char* ptx, std::vector<const Kernel*>* found) {
    static std::unordered_map<std::string, ptx::Module> modules;
    auto known = modules.find(ptx);
    if (known == modules.end()) try {
            known = modules.emplace(ptx, ptx::read_module(text_instead(ptx))).first;
        } catch (const ptx::Refusal& refusal) {
            return complain_of(refusal);
        }
    for (ptx::Entry* entry : known->second.entries) {
        entry->module = &known->second;
        found->push_back(&entry->kernel);
    }
    if (!found->empty()) return CUDA_SUCCESS;
    complain("the PTX declares no entry");
    return CUDA_ERROR_INVALID_PTX;
}

}  // namespace

CUresult make_ready(const Kernel& kernel) {
    if (kernel.entry == nullptr || kernel.entry->decoded) return CUDA_SUCCESS;
    try {
        ptx::decode(kernel.entry);
        return CUDA_SUCCESS;
    } catch (const ptx::Refusal& refusal) {
        return complain_of(refusal);
    }
}

const Kernel* compiled_kernel(const std::string& name) {
    for (const Kernel& kernel : kernels())
        if (name == kernel.name) return &kernel;
    return nullptr;
}

std::vector<Kernel>& kernels() {
    static std::vector<Kernel> all;
    return all;
}

CUresult find_kernels(const char* ptx, std::vector<const Kernel*>* found) {
    if (const CUresult refused = check_header(ptx)) return refused;
    if (settings().code == Code::Ptx) return read_entries(ptx, found);
    for (const char* at = ptx; (at = find_directive(at, ".visible .entry")) != nullptr;) {
        const std::string name = word_at(at);
        const Kernel* kernel = compiled_kernel(name);
        if (kernel == nullptr) {
            complain("entry " + name + " of the PTX is not among the kernels compiled in; build PTX and emulator from the same sources");
            return CUDA_ERROR_INVALID_PTX;
        }
        const std::size_t declared = declared_argument_bytes(at, name);
        if (declared != kernel->argument_bytes) {
            complain("entry " + name + " takes " + std::to_string(declared) + " argument bytes in the PTX and " +
                     std::to_string(kernel->argument_bytes) + " in the source; regenerate the PTX");
            return CUDA_ERROR_INVALID_PTX;
        }
        found->push_back(kernel);
    }
    if (!found->empty()) return CUDA_SUCCESS;
    complain("the PTX declares no entry");
    return CUDA_ERROR_INVALID_PTX;
}

}  // namespace emulator
