// What the cases of llama.cpp's test-chat.cpp need around them: its types, and a tester that prints instead of testing.
#include <cassert>
#include <cstdio>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

struct common_chat_tool_call { std::string name, arguments, id; };
struct common_chat_msg_content_part { std::string type, text; };
struct common_chat_msg {
    std::string role, content;
    std::vector<common_chat_msg_content_part> content_parts;
    std::vector<common_chat_tool_call> tool_calls;
    std::string reasoning_content, tool_name, tool_call_id;
};
struct common_chat_tool { std::string name, description, parameters; };

enum common_chat_tool_choice { COMMON_CHAT_TOOL_CHOICE_AUTO, COMMON_CHAT_TOOL_CHOICE_REQUIRED, COMMON_CHAT_TOOL_CHOICE_NONE };
enum common_chat_continuation {
    COMMON_CHAT_CONTINUATION_NONE, COMMON_CHAT_CONTINUATION_AUTO, COMMON_CHAT_CONTINUATION_REASONING, COMMON_CHAT_CONTINUATION_CONTENT
};
enum common_reasoning_format {
    COMMON_REASONING_FORMAT_NONE, COMMON_REASONING_FORMAT_AUTO, COMMON_REASONING_FORMAT_DEEPSEEK_LEGACY, COMMON_REASONING_FORMAT_DEEPSEEK
};

struct common_chat_templates_inputs {
    std::vector<common_chat_msg> messages;
    std::string json_schema;
    bool add_generation_prompt = true, use_jinja = true, parallel_tool_calls = false, enable_thinking = true;
    common_chat_continuation continue_final_message = COMMON_CHAT_CONTINUATION_NONE;
    std::vector<common_chat_tool> tools;
    common_chat_tool_choice tool_choice = COMMON_CHAT_TOOL_CHOICE_AUTO;
    common_reasoning_format reasoning_format = COMMON_REASONING_FORMAT_NONE;
    std::map<std::string, std::string> chat_template_kwargs;
};

// The checks of prompts and grammars among the cases find nothing wrong.
#define throw (void)
#define GGML_ASSERT(...) (void) 0
#define LOG_DBG(...) (void) 0
#define LOG_INF(...) (void) 0
#define LOG_ERR(...) (void) 0
#undef assert
#define assert(...) (void) 0

using common_chat_templates_ptr = std::shared_ptr<std::string>;
struct common_chat_params { std::string prompt, parser, generation_prompt, grammar; bool grammar_lazy = false; };
struct common_chat_parser_params { common_chat_parser_params(const common_chat_params &) {} std::string generation_prompt; };
struct common_peg_arena { void load(const std::string &) {} };
static common_chat_templates_ptr read_templates(const std::string & path) { return std::make_shared<std::string>(path); }
static std::string read_file(const std::string & path) { return path; }
template <class... T> static common_chat_templates_ptr common_chat_templates_init(T...) { return read_templates(""); }
template <class... T> static common_chat_params common_chat_templates_apply(T...) { return {}; }
template <class... T> static common_chat_msg common_chat_peg_parse(const T &...) { return {}; }
template <class... T> static bool string_ends_with(const T &...) { return true; }
template <class... T> static void assert_contains(const T &...) {}
template <class... T> static void assert_not_contains(const T &...) {}
template <class... T> static void assert_ends_with(const T &...) {}
template <class... T> static void assert_msg_equals(const T &...) {}
template <class T> static void assert_equals(const T &, const T &) {}

static std::string quoted(const std::string & text) {
    std::string result = "\"";
    char code[8];
    for (unsigned char c : text) {
        if (c == '"' || c == '\\') { result += '\\'; result += c; }
        else if (c < 0x20) { snprintf(code, sizeof code, "\\u%04x", c); result += code; }
        else { result += c; }
    }
    return result + "\"";
}

template <class T, class Show> static std::string listed(const std::vector<T> & values, Show show) {
    std::string result;
    for (const auto & value : values) { result += (result.empty() ? "" : ", ") + show(value); }
    return "[" + result + "]";
}

static std::string as_json(const common_chat_tool & tool) {
    return "{\"name\": " + quoted(tool.name) + ", \"description\": " + quoted(tool.description) + ", \"parameters\": " + quoted(tool.parameters) + "}";
}
static std::string as_json(const common_chat_tool_call & call) {
    return "[" + quoted(call.name) + ", " + quoted(call.arguments) + "]";
}
static std::string as_json(const common_chat_msg & message) {
    std::string content = message.content;
    for (const auto & part : message.content_parts) { content += part.text; }
    return "{\"role\": " + quoted(message.role) + ", \"content\": " + quoted(content) + ", \"reasoning\": " + quoted(message.reasoning_content) +
        ", \"calls\": " + listed(message.tool_calls, [](const common_chat_tool_call & each) { return as_json(each); }) + "}";
}

template <class Case> static void print_case(const std::string & path, const Case & tc) {
    const auto & p = tc.params;
    auto truth = [](bool value) { return std::string(value ? "true" : "false"); };
    printf("{\"template\": %s, \"line\": %d, \"text\": %s, \"cut\": %s, \"thinking\": %s, \"reasoning_format\": %d, \"choice\": %d, "
           "\"continuation\": %d, \"tools\": %s, \"messages\": %s, \"expected\": %s}\n",
        quoted(path).c_str(), tc.line, quoted(tc.input).c_str(), truth(tc.is_partial).c_str(), truth(p.enable_thinking).c_str(),
        p.reasoning_format, p.tool_choice, p.continue_final_message + !p.add_generation_prompt,
        listed(p.tools, [](const common_chat_tool & each) { return as_json(each); }).c_str(),
        listed(p.messages, [](const common_chat_msg & each) { return as_json(each); }).c_str(), as_json(tc.expect).c_str());
}
