// Which kernels a file of machine code holds, and whether a driver of this version would take it on
// this device. Its code is not run: its entries run as the kernels compiled from the same sources.

#include <elf.h>

#include <cstring>

#include "machine.hpp"

namespace emulator {
namespace {

// From this version of the format on, which drivers from 12.8 on read, the device stands in the
// flags' second byte, and before in the first.
constexpr unsigned SYSTEM_VERSION_12_8 = 8;
// Attributes of an entry: their format, and the one that says how many bytes its parameters have.
constexpr unsigned char SIZED = 4, CBANK_PARAM_SIZE = 0x19;

constexpr char ATTRIBUTES_OF[] = ".nv.info.";

CUresult refuse(CUresult code, const std::string& text) {
    complain("machine code " + text);
    return code;
}

std::uint16_t half_at(const unsigned char* bytes) {
    std::uint16_t half;
    std::memcpy(&half, bytes, sizeof half);
    return half;
}

// Bytes of an entry's parameters by its attributes; 0 if they do not say.
std::size_t parameter_bytes(const unsigned char* at, const unsigned char* end) {
    while (at + 4 <= end) {
        const std::uint16_t value = half_at(at + 2);
        if (at[1] == CBANK_PARAM_SIZE) return value;
        at += at[0] == SIZED ? 4 + value : 4;
    }
    return 0;
}

CUresult check_device(const Elf64_Ehdr& file) {
    const bool is_late = file.e_ident[EI_ABIVERSION] >= SYSTEM_VERSION_12_8;
    if (is_late && settings().driver_version < 12080)
        return refuse(CUDA_ERROR_INVALID_IMAGE, "in the format of drivers from 12.8 on: this driver does not read it");
    const int device = int(file.e_flags >> (is_late ? 8 : 0) & 0xff), own = settings().compute_capability;
    if (device / 10 == own / 10 && device <= own) return CUDA_SUCCESS;
    return refuse(CUDA_ERROR_NO_BINARY_FOR_GPU, "for sm_" + std::to_string(device) + ": this device is an sm_" + std::to_string(own));
}

}  // namespace

bool is_machine_code(const void* image) { return std::memcmp(image, ELFMAG, SELFMAG) == 0; }

CUresult find_kernels_of_machine_code(const void* image, std::vector<const Kernel*>* found) {
    // What runs the text of modules has no use for anything else.
    if (settings().code == Code::Ptx) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    const auto* bytes = static_cast<const unsigned char*>(image);
    // A shorter text that begins as ELF does ends with its first 0.
    if (std::strlen(static_cast<const char*>(image)) < 7) return refuse(CUDA_ERROR_INVALID_IMAGE, "without a header");
    Elf64_Ehdr file;
    std::memcpy(&file, bytes, sizeof file);
    if (file.e_ident[EI_CLASS] != ELFCLASS64 || file.e_ident[EI_DATA] != ELFDATA2LSB || file.e_machine != EM_CUDA || file.e_shentsize != sizeof(Elf64_Shdr))
        return refuse(CUDA_ERROR_INVALID_IMAGE, "for something that is no GPU");
    if (const CUresult refused = check_device(file)) return refused;
    std::vector<Elf64_Shdr> sections(file.e_shnum);
    std::memcpy(sections.data(), bytes + file.e_shoff, sections.size() * sizeof(Elf64_Shdr));
    const char* names = static_cast<const char*>(image) + sections.at(file.e_shstrndx).sh_offset;
    for (const Elf64_Shdr& section : sections) {
        const char* name = names + section.sh_name;
        if (std::strncmp(name, ATTRIBUTES_OF, sizeof ATTRIBUTES_OF - 1) != 0) continue;
        name += sizeof ATTRIBUTES_OF - 1;
        const Kernel* kernel = compiled_kernel(name);
        if (kernel == nullptr) return refuse(CUDA_ERROR_INVALID_IMAGE, "has the entry " + std::string(name) + ", the kernels compiled in have not");
        const std::size_t taken = parameter_bytes(bytes + section.sh_offset, bytes + section.sh_offset + section.sh_size);
        if (taken != kernel->argument_bytes)
            return refuse(CUDA_ERROR_INVALID_IMAGE, "of " + std::string(name) + " takes " + std::to_string(taken) + " argument bytes, its source " +
                                                        std::to_string(kernel->argument_bytes));
        if (taken > argument_bytes_max())
            return refuse(CUDA_ERROR_INVALID_IMAGE, "of " + std::string(name) + " takes " + std::to_string(taken) + " argument bytes, this driver passes " +
                                                        std::to_string(argument_bytes_max()));
        found->push_back(kernel);
    }
    if (!found->empty()) return CUDA_SUCCESS;
    return refuse(CUDA_ERROR_INVALID_IMAGE, "has no entry");
}

}  // namespace emulator
