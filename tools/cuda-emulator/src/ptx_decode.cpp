// The body of an entry as instructions on rows.

#include <cstdlib>
#include <cstring>
#include <map>

#include "ptx_machine.hpp"
#include "ptx_text.hpp"

namespace emulator {
namespace ptx {
namespace {

constexpr std::pair<const char*, Special> SPECIALS[] = {
    {"%tid.x", Special::ThreadX}, {"%tid.y", Special::ThreadY}, {"%tid.z", Special::ThreadZ},
    {"%ctaid.x", Special::BlockX}, {"%ctaid.y", Special::BlockY}, {"%ctaid.z", Special::BlockZ},
    {"%ntid.x", Special::BlockSizeX}, {"%ntid.y", Special::BlockSizeY}, {"%ntid.z", Special::BlockSizeZ},
    {"%nctaid.x", Special::GridX}, {"%nctaid.y", Special::GridY}, {"%nctaid.z", Special::GridZ},
    {"%laneid", Special::Lane}, {"%warpid", Special::WarpNumber}, {"%lanemask_lt", Special::LaneMaskBelow},
};

// Whether `text` is a number, and its bits: integers in the forms of C, floats as 0f and 0d.
bool read_number(const std::string& text, std::uint64_t* bits) {
    if (text.size() > 2 && text[0] == '0' && std::strchr("fFdD", text[1]) != nullptr) {
        char* end = nullptr;
        *bits = std::strtoull(text.c_str() + 2, &end, 16);
        return *end == 0 && text.size() == (text[1] == 'f' || text[1] == 'F' ? 10u : 18u);
    }
    const bool negative = text[0] == '-';
    char* end = nullptr;
    if (text.size() == negative || !std::strchr("0123456789", text[negative])) return false;
    *bits = std::strtoull(text.c_str() + negative, &end, 0);
    if (*end == 'U') ++end;
    if (negative) *bits = 0 - *bits;
    return *end == 0;
}

std::uint64_t low_bytes(unsigned bytes) { return bytes == 8 ? ~std::uint64_t(0) : (std::uint64_t(1) << (8 * bytes)) - 1; }

Unit unit_of(const std::string& opcode) {
    const bool is_float = opcode.find(".f32") != std::string::npos || opcode.find(".f64") != std::string::npos;
    for (const char* name : {"div.", "sqrt.", "rcp."})
        if (is_float && begins_with(opcode, name)) return Unit::Division;
    for (const char* name : {"add.", "sub.", "mul.", "fma.", "min.", "max.", "setp.", "cvt."})
        if (begins_with(opcode, name) && opcode.find(".f64") != std::string::npos) return Unit::Double;
    return Unit::Plain;
}

void split_whole(Warp& warp, const Instruction& instruction, std::uint32_t lanes) {
    const unsigned bytes = instruction.element_bytes;
    each_lane(lanes, [&](unsigned lane) {
        const std::uint64_t whole = warp.row(instruction.at[5])[lane];
        for (unsigned i = 0; i < instruction.count; ++i)
            warp.row(instruction.at[i])[lane] = whole >> (8 * bytes * i) & low_bytes(bytes);
    });
}

void join_parts(Warp& warp, const Instruction& instruction, std::uint32_t lanes) {
    const unsigned bytes = instruction.element_bytes;
    each_lane(lanes, [&](unsigned lane) {
        std::uint64_t whole = 0;
        for (unsigned i = 0; i < instruction.count; ++i)
            whole |= (warp.row(instruction.at[i])[lane] & low_bytes(bytes)) << (8 * bytes * i);
        warp.row(instruction.at[5])[lane] = whole;
    });
}

// Rows of constants and of what nobody reads fit every instruction.
constexpr std::uint8_t ANY_BYTES = 0xff;
enum class Widths { Same, OrWider };

class Decoder {
public:
    Decoder(const Module& module, Entry* entry) : module_(module), entry_(*entry) {}

    void run() {
        scopes_.emplace_back();
        sink_ = new_row(ANY_BYTES);
        for (const Statement& statement : statements(entry_.text, entry_.first_line)) {
            line_ = statement.line;
            read(statement);
        }
        // Whoever runs past the end returns.
        begin("ret").kind = Kind::Return;
        for (const auto& jump : jumps_) {
            const auto label = labels_.find(jump.second);
            if (label == labels_.end()) throw Refusal{entry_.code[jump.first].line, "no label " + jump.second};
            entry_.code[jump.first].target = label->second;
        }
    }

private:
    std::uint32_t new_row(std::uint8_t bytes) {
        row_bytes_.push_back(bytes);
        return entry_.rows++;
    }

    // The assembler takes registers of an instruction's own width only. Accesses extend into a
    // wider one or store its low bytes, and conversions read its low bytes.
    void check_width(std::uint32_t row, std::uint8_t bytes, Widths widths) const {
        const std::uint8_t found = row_bytes_[row];
        if (found == bytes || found == ANY_BYTES) return;
        if (widths == Widths::OrWider && bytes != 0 && found > bytes) return;
        const auto name = [](std::uint8_t width) { return width == 0 ? std::string("a predicate") : "a register of " + std::to_string(width) + " bytes"; };
        refuse("expected " + name(bytes) + ", found " + name(found) + " in `" + text_ + "`");
    }

    [[noreturn]] void refuse(const std::string& why) const { throw Refusal{line_, why}; }

    Instruction& begin(const std::string& text) {
        entry_.code.emplace_back();
        entry_.code.back().line = line_;
        entry_.code.back().text = text;
        return entry_.code.back();
    }

    void read(const Statement& statement) {
        const std::string& text = statement.text;
        if (text == "{") {
            scopes_.emplace_back();
            return;
        }
        if (text == "}") {
            if (scopes_.size() == 1) refuse("a brace closes nothing");
            return scopes_.pop_back();
        }
        if (text.back() == ':') {
            if (!labels_.emplace(text.substr(0, text.size() - 1), entry_.code.size()).second) refuse("a label twice: " + text);
            return;
        }
        if (begins_with(text, ".reg ")) return declare_registers(text);
        if (begins_with(text, ".shared ")) {
            place_shared(shared_declaration(statement));
            return;
        }
        if (begins_with(text, ".pragma ") || begins_with(text, ".loc ")) return;
        if (text[0] == '.') refuse("unknown directive `" + text + "`");
        instruction(text);
    }

    // `.reg .f32 %f<411>` or `.reg .b32 a, b`.
    void declare_registers(const std::string& text) {
        const std::size_t type_end = text.find(' ', 5);
        const std::string type = text.substr(5, type_end - 5);
        const std::uint8_t bytes = std::uint8_t(type_bytes(type));
        if (type_end == std::string::npos || (bytes == 0 && type != ".pred")) refuse("unknown directive `" + text + "`");
        for (const std::string& name : split_operands(text.substr(type_end))) {
            const std::size_t bracket = name.find('<');
            if (bracket == std::string::npos) {
                scopes_.back()[name] = new_row(bytes);
                continue;
            }
            const unsigned long count = std::strtoul(name.c_str() + bracket + 1, nullptr, 10);
            for (unsigned long i = 0; i < count; ++i) scopes_.back()[name.substr(0, bracket) + std::to_string(i)] = new_row(bytes);
        }
    }

    std::uint64_t place_shared(const std::pair<std::string, SharedSymbol>& declared) {
        const std::size_t alignment = declared.second.alignment;
        const std::size_t at = (entry_.shared_bytes + alignment - 1) / alignment * alignment;
        entry_.shared_bytes = at + declared.second.len_bytes;
        return shared_[declared.first] = SHARED_BASE + at;
    }

    std::uint32_t constant(std::uint64_t value) {
        const auto known = constants_.find(value);
        if (known != constants_.end()) return known->second;
        const std::uint32_t row = constants_[value] = new_row(ANY_BYTES);
        entry_.constants.push_back({row, value});
        return row;
    }

    const std::uint32_t* find_register(const std::string& name) const {
        for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
            const auto found = scope->find(name);
            if (found != scope->end()) return &found->second;
        }
        return nullptr;
    }

    std::uint32_t special(const std::string& name) {
        for (const auto& known : SPECIALS)
            if (name == known.first) {
                const auto row = specials_.emplace(name, entry_.rows);
                if (row.second) entry_.specials.push_back({new_row(4), known.second});
                return row.first->second;
            }
        refuse("unknown operand `" + name + "`");
    }

    std::uint64_t symbol(const std::string& name) {
        if (name == entry_.name + "_param_0") return PARAMETER_BASE;
        const auto placed = shared_.find(name);
        if (placed != shared_.end()) return placed->second;
        const auto of_module = module_.shared.find(name);
        if (of_module != module_.shared.end()) return place_shared(*of_module);
        refuse("unknown operand `" + name + "`");
    }

    std::uint32_t source(const std::string& text) {
        if (const std::uint32_t* row = find_register(text)) return *row;
        std::uint64_t value;
        if (read_number(text, &value)) return constant(value);
        return text[0] == '%' ? special(text) : constant(symbol(text));
    }

    std::uint32_t result(const std::string& text) {
        if (text == "_") return sink_;
        const std::uint32_t* row = find_register(text);
        if (row == nullptr) refuse("expected a register, found `" + text + "`");
        return *row;
    }

    // `{%f1, %f2}` as its parts, or the one operand.
    std::vector<std::string> parts_of(const std::string& text) const {
        return text[0] == '{' ? split_operands(text.substr(1, text.size() - 2)) : std::vector<std::string>{text};
    }

    // `[%rd1+-16]`, `[NAME+16]` or `[1024]`.
    void address(const std::string& text, Instruction* to) {
        if (text.size() < 3 || text.front() != '[' || text.back() != ']') refuse("expected an address, found `" + text + "`");
        const std::string inside = text.substr(1, text.size() - 2);
        const std::size_t plus = inside.find('+');
        to->address = source(trimmed(inside.substr(0, plus)));
        check_width(to->address, 8, Widths::Same);
        if (plus == std::string::npos) return;
        std::uint64_t offset;
        if (!read_number(trimmed(inside.substr(plus + 1)), &offset)) refuse("expected an offset, found `" + text + "`");
        to->offset = std::int64_t(offset);
    }

    void instruction(std::string text) {
        Instruction decoded;
        decoded.line = line_;
        decoded.text = text_ = text;
        if (text[0] == '@') {
            const std::size_t end = text.find(' ');
            const bool negated = text[1] == '!';
            decoded.guard = source(text.substr(1 + negated, end - 1 - negated));
            decoded.guard_skips = negated;
            check_width(decoded.guard, 0, Widths::Same);
            text = trimmed(text.substr(end));
        }
        const std::size_t end = text.find(' ');
        const std::string opcode = text.substr(0, end);
        const std::vector<std::string> operands =
            end == std::string::npos ? std::vector<std::string>{} : split_operands(text.substr(end));
        if (opcode == "mov.b32" || opcode == "mov.b64")
            if (operands.size() == 2 && (operands[0][0] == '{' || operands[1][0] == '{')) {
                move_parts(opcode, operands, &decoded);
                return entry_.code.push_back(decoded);
            }
        if (!control(opcode, operands, &decoded) && !access(opcode, operands, &decoded)) compute(opcode, operands, &decoded);
        entry_.code.push_back(decoded);
    }

    bool control(const std::string& opcode, const std::vector<std::string>& operands, Instruction* to) {
        if (opcode == "bra" || opcode == "bra.uni") {
            to->kind = Kind::Branch;
            expect(operands, 1);
            jumps_.emplace_back(entry_.code.size(), operands[0]);
        } else if (opcode == "ret") {
            to->kind = Kind::Return;
        } else if (opcode == "bar.sync") {
            to->kind = Kind::Barrier;
            expect(operands, 1);
            if (operands[0] != "0") refuse("expected barrier 0 of all threads, found `" + to->text + "`");
        } else {
            return false;
        }
        return true;
    }

    void expect(const std::vector<std::string>& operands, std::size_t count) const {
        if (operands.size() != count)
            refuse("expected " + std::to_string(count) + " operands, found " + std::to_string(operands.size()));
    }

    bool access(const std::string& opcode, const std::vector<std::string>& operands, Instruction* to) {
        if (!decode_access(split_at(opcode, '.'), to)) return false;
        if (to->kind == Kind::Shuffle) return shuffle(operands, to), true;
        const bool stores = begins_with(opcode, "st.");
        expect(operands, 2);
        address(operands[stores ? 0 : 1], to);
        const std::vector<std::string> values = parts_of(operands[stores ? 1 : 0]);
        if (values.size() != to->count) refuse("expected " + std::to_string(to->count) + " elements, found `" + to->text + "`");
        for (std::size_t i = 0; i < values.size(); ++i) {
            to->at[i] = stores ? source(values[i]) : result(values[i]);
            check_width(to->at[i], to->element_bytes, Widths::OrWider);
        }
        return true;
    }

    // Result, whether there was a source lane, value, lane, clamp and mask.
    void shuffle(const std::vector<std::string>& operands, Instruction* to) {
        expect(operands, 5);
        const std::vector<std::string> results = split_at(operands[0], '|');
        to->at[0] = result(trimmed(results[0]));
        to->at[1] = results.size() > 1 ? result(trimmed(results[1])) : sink_;
        for (std::size_t i = 1; i < 5; ++i) to->at[1 + i] = source(operands[i]);
        for (std::size_t i = 0; i < 6; ++i) check_width(to->at[i], i == 1 ? 0 : 4, Widths::Same);
    }

    void compute(const std::string& opcode, const std::vector<std::string>& operands, Instruction* to) {
        const Form* form = find_form(opcode);
        if (form == nullptr) refuse("unknown instruction `" + opcode + "` in `" + to->text + "`");
        expect(operands, 1 + form->sources);
        to->run = form->run;
        to->unit = unit_of(opcode);
        to->at[0] = result(operands[0]);
        for (unsigned i = 0; i < form->sources; ++i) to->at[1 + i] = source(operands[1 + i]);
        check_width(to->at[0], form->operand_bytes[0], Widths::Same);
        const Widths widths = begins_with(opcode, "cvt.") ? Widths::OrWider : Widths::Same;
        for (unsigned i = 1; i <= form->sources; ++i) check_width(to->at[i], form->operand_bytes[i], widths);
    }

    // `mov.b64 {%r1, %r2}, %rd1` and its reverse: parts from the lowest bits up, the whole last.
    void move_parts(const std::string& opcode, const std::vector<std::string>& operands, Instruction* to) {
        const bool splits = operands[0][0] == '{';
        const std::vector<std::string> parts = parts_of(operands[splits ? 0 : 1]);
        const unsigned whole_bytes = opcode == "mov.b32" ? 4 : 8;
        if (parts.size() != 2 && parts.size() != 4) refuse("expected 2 or 4 parts, found `" + to->text + "`");
        to->count = std::uint8_t(parts.size());
        to->element_bytes = std::uint8_t(whole_bytes / parts.size());
        to->run = splits ? split_whole : join_parts;
        for (std::size_t i = 0; i < parts.size(); ++i) to->at[i] = splits ? result(parts[i]) : source(parts[i]);
        to->at[5] = splits ? source(operands[1]) : result(operands[0]);
        for (std::size_t i = 0; i < parts.size(); ++i) check_width(to->at[i], to->element_bytes, Widths::Same);
        check_width(to->at[5], std::uint8_t(whole_bytes), Widths::Same);
    }

    const Module& module_;
    Entry& entry_;
    std::uint32_t line_ = 0, sink_ = 0;
    std::string text_;  // of the instruction that is read
    std::vector<std::uint8_t> row_bytes_;
    std::vector<std::map<std::string, std::uint32_t>> scopes_;
    std::map<std::string, std::uint32_t> specials_;
    std::map<std::uint64_t, std::uint32_t> constants_;
    std::map<std::string, std::uint64_t> shared_;
    std::map<std::string, std::uint32_t> labels_;
    std::vector<std::pair<std::size_t, std::string>> jumps_;
};

}  // namespace

void decode(Entry* entry) {
    Decoder(*entry->module, entry).run();
    entry->decoded = true;
}

}  // namespace ptx
}  // namespace emulator
