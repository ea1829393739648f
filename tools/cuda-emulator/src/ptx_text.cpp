// PTX text as statements, and a module as entries.

#include "ptx_text.hpp"

#include <cstdlib>
#include <cstring>
#include <list>

namespace emulator {
namespace ptx {
namespace {

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

// Braces of a vector operand belong to its statement: they follow an opcode.
bool opens_block(const std::string& so_far) { return trimmed(so_far).empty(); }

// Where a label ends: a colon that follows one word.
bool is_label(const std::string& so_far) {
    const std::string word = trimmed(so_far);
    return !word.empty() && word.find_first_of(" ,{[\"") == std::string::npos;
}

std::string without_comments(const std::string& text) {
    std::string result = text;
    for (std::size_t at = 0; at + 1 < result.size(); ++at) {
        if (result[at] != '/') continue;
        if (result[at + 1] == '/')
            while (at < result.size() && result[at] != '\n') result[at++] = ' ';
        else if (result[at + 1] == '*') {
            const std::size_t end = std::min(result.find("*/", at + 2), result.size() - 2) + 2;
            for (; at < end; ++at)
                if (result[at] != '\n') result[at] = ' ';
        }
    }
    return result;
}

// Bytes of the entry's only parameter.
std::size_t argument_bytes(const std::string& head, std::uint32_t line) {
    const std::size_t open = head.find('('), close = head.find(')');
    if (open == std::string::npos || close == std::string::npos) throw Refusal{line, "an entry without parentheses"};
    const std::vector<std::string> parameters = split_operands(head.substr(open + 1, close - open - 1));
    if (parameters.size() != 1) throw Refusal{line, "expected an entry with one parameter, found " + std::to_string(parameters.size())};
    std::size_t bytes = 0;
    for (const std::string& word : split_at(parameters[0], ' ')) {
        if (type_bytes(word) != 0) bytes = type_bytes(word);
        const std::size_t bracket = word.find('[');
        if (bracket != std::string::npos) bytes *= std::strtoull(word.c_str() + bracket + 1, nullptr, 10);
    }
    return bytes;
}

unsigned threads_max(const std::string& head) {
    for (const char* directive : {".maxntid", ".reqntid"}) {
        const std::size_t at = head.find(directive);
        if (at == std::string::npos) continue;
        unsigned product = 1;
        for (const std::string& word : split_operands(head.substr(at + std::strlen(directive), head.find('.', at + 1) - at - 8)))
            if (std::atoi(word.c_str()) > 0) product *= unsigned(std::atoi(word.c_str()));
        return product;
    }
    return BLOCK_THREADS_MAX;
}

// Entries stay for the life of the process: launches and graphs hold their addresses.
struct Entries {
    std::list<Entry> list;
    ~Entries() { write_counts(list); }
};

std::list<Entry>& all_entries() {
    static Entries entries;
    return entries.list;
}

std::uint32_t lines_in(const std::string& text, std::size_t from, std::size_t to) {
    std::uint32_t lines = 0;
    for (std::size_t at = from; at < to; ++at) lines += text[at] == '\n';
    return lines;
}

Entry* read_entry(const std::string& text, std::size_t at, std::uint32_t line, std::size_t* end) {
    const std::size_t open = text.find("\n{", at), close = text.find("\n}", at);
    if (open == std::string::npos || close == std::string::npos || close < open)
        throw Refusal{line, "an entry whose braces do not begin lines"};
    all_entries().emplace_back();
    Entry& entry = all_entries().back();
    const std::string head = without_comments(text.substr(at, open - at));
    entry.name = trimmed(head.substr(0, head.find('(')));
    entry.text = text.substr(open + 2, close - open - 2);
    entry.first_line = line + lines_in(text, at, open + 2);
    entry.kernel.name = entry.name.c_str();
    entry.kernel.argument_bytes = argument_bytes(head, line);
    entry.kernel.block_threads_max = threads_max(head.substr(head.find(')')));
    entry.kernel.entry = &entry;
    *end = close + 2;
    return &entry;
}

}  // namespace

std::size_t type_bytes(const std::string& word) {
    if (word == ".b8" || word == ".u8" || word == ".s8") return 1;
    if (word == ".b16" || word == ".u16" || word == ".s16") return 2;
    if (word == ".b32" || word == ".u32" || word == ".s32" || word == ".f32") return 4;
    if (word == ".b64" || word == ".u64" || word == ".s64" || word == ".f64") return 8;
    return 0;
}

std::string trimmed(const std::string& text) {
    std::size_t from = 0, to = text.size();
    while (from < to && is_space(text[from])) ++from;
    while (to > from && is_space(text[to - 1])) --to;
    return text.substr(from, to - from);
}

bool begins_with(const std::string& text, const std::string& start) { return text.compare(0, start.size(), start) == 0; }

std::vector<std::string> split_at(const std::string& text, char separator) {
    std::vector<std::string> parts;
    std::size_t from = 0;
    while (from <= text.size()) {
        const std::size_t to = std::min(text.find(separator, from), text.size());
        if (to > from) parts.push_back(text.substr(from, to - from));
        from = to + 1;
    }
    return parts;
}

std::vector<std::string> split_operands(const std::string& text) {
    std::vector<std::string> parts;
    std::string part;
    int depth = 0;
    for (char c : text) {
        depth += (c == '{' || c == '[' || c == '(') - (c == '}' || c == ']' || c == ')');
        if (c == ',' && depth == 0) {
            parts.push_back(trimmed(part));
            part.clear();
        } else {
            part += c;
        }
    }
    if (!trimmed(part).empty()) parts.push_back(trimmed(part));
    return parts;
}

std::vector<Statement> statements(const std::string& text, std::uint32_t first_line) {
    std::vector<Statement> found;
    std::string word;
    std::uint32_t line = first_line, begun = first_line;
    const auto end = [&](const std::string& last) {
        const std::string whole = trimmed(word) + last;
        if (!whole.empty()) found.push_back({begun, whole});
        word.clear();
    };
    for (char c : without_comments(text)) {
        if (c == '\n') ++line;
        if (trimmed(word).empty()) begun = line;
        if (c == ';') {
            end("");
        } else if ((c == '{' || c == '}') && opens_block(word)) {
            end(std::string(1, c));
        } else if (c == ':' && is_label(word)) {
            end(":");
        } else if (!is_space(c)) {
            word += c;
        } else if (!word.empty() && word.back() != ' ') {
            word += ' ';
        }
    }
    end("");
    return found;
}

std::pair<std::string, SharedSymbol> shared_declaration(const Statement& statement) {
    SharedSymbol symbol{1, 0};
    std::string name;
    const std::vector<std::string> words = split_at(statement.text, ' ');
    for (std::size_t i = 0; i < words.size(); ++i) {
        if (words[i] == ".align" && i + 1 < words.size()) symbol.alignment = std::strtoull(words[++i].c_str(), nullptr, 10);
        else if (type_bytes(words[i]) != 0) symbol.len_bytes = type_bytes(words[i]);
        else if (words[i][0] != '.') name = words[i];
    }
    const std::size_t bracket = name.find('[');
    if (bracket != std::string::npos) symbol.len_bytes *= std::strtoull(name.c_str() + bracket + 1, nullptr, 10);
    if (name.empty() || symbol.len_bytes == 0 || symbol.alignment == 0)
        throw Refusal{statement.line, "expected `.shared .align N .b8 NAME[COUNT]`, found `" + statement.text + "`"};
    return {name.substr(0, bracket), symbol};
}

Module read_module(const std::string& text) {
    Module module;
    const std::string directive = ".visible .entry ";
    std::size_t at = 0, line_from = 0;
    std::uint32_t line = 1;
    std::string outside;
    for (;;) {
        const std::size_t found = text.find("\n" + directive, at);
        outside += text.substr(at, found == std::string::npos ? std::string::npos : found - at);
        if (found == std::string::npos) break;
        const std::size_t name = found + 1 + directive.size();
        line += lines_in(text, line_from, name);
        line_from = name;
        module.entries.push_back(read_entry(text, name, line, &at));
    }
    for (const Statement& statement : statements(outside, 1))
        if (statement.text.find(".shared ") != std::string::npos) {
            // Statements without `;` come before: the version, the target and the address size.
            const std::size_t begin = statement.text.find(".shared ");
            module.shared.insert(shared_declaration({statement.line, statement.text.substr(begin)}));
        }
    return module;
}

}  // namespace ptx
}  // namespace emulator
