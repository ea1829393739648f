// Statements of PTX text.
#pragma once

#include <string>
#include <vector>

#include "ptx_program.hpp"

namespace emulator {
namespace ptx {

// A directive or an instruction without its `;`, a label with its `:`, or a brace.
struct Statement {
    std::uint32_t line;
    std::string text;
};

// Comments removed, space between words made single.
std::vector<Statement> statements(const std::string& text, std::uint32_t first_line);
std::string trimmed(const std::string& text);
// What stands between commas outside of brackets of any kind.
std::vector<std::string> split_operands(const std::string& text);
std::vector<std::string> split_at(const std::string& text, char separator);
// Bytes of `.b8` to `.f64`; 0 if it is another word.
std::size_t type_bytes(const std::string& word);
bool begins_with(const std::string& text, const std::string& start);
// `.shared .align 8 .b8 NAME[512]`; throws Refusal if it is another declaration.
std::pair<std::string, SharedSymbol> shared_declaration(const Statement& statement);

}  // namespace ptx
}  // namespace emulator
