//! S-08, UR-78: a special token exists in a prompt only where the template put it. Every spelling of
//! the added vocabulary goes into every text field of every API.

mod support;

use pelagos_codec::convert::{Options, convert};
use pelagos_codec::render::render;
use pelagos_codec::types::{Protocol, SpecialTokens};
use serde_json::{Value, json};
use support::tokenizer;

/// What stands in a template for the text under test; harmless in every field, names included.
const MARK: &str = "FIELD";

const PNG: &str = "data:image/png;base64,iVBORw0KGgo=";

/// Requests whose strings hold `MARK` in every text field that reaches the prompt.
fn requests() -> Vec<(Protocol, Value)> {
    let schema = || {
        json!({"type": "object", "description": MARK, "title": MARK, "properties": {
            "FIELD": {"type": "string", "description": MARK, "enum": [MARK], "default": MARK}}})
    };
    let chat_tool = json!({"type": "function", "function": {
        "name": "f", "description": MARK, "parameters": schema()}});
    let call = |id: &str| {
        json!({"id": id, "type": "function", "function": {
            "name": MARK, "arguments": json!({"FIELD": MARK, "n": {"FIELD": [MARK]}}).to_string()}})
    };
    let broken_call = json!({"id": "b", "type": "function", "function": {
        "name": "g", "arguments": "{FIELD"}});
    let chat = json!({"model": "DeepSeek-V4.1-Flash", "tools": [chat_tool], "messages": [
        {"role": "system", "content": MARK, "name": MARK},
        {"role": "latest_reminder", "content": MARK},
        {"role": "user", "content": [{"type": "text", "text": MARK},
            {"type": "image_url", "image_url": {"url": PNG}}, {"type": "text", "text": MARK}]},
        {"role": "assistant", "content": MARK, "reasoning_content": MARK,
            "tool_calls": [call("a"), broken_call]},
        {"role": "tool", "tool_call_id": "a", "content": MARK},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": MARK}]},
        {"role": "user", "content": MARK}],
        "response_format": {"type": "text"}});
    let mut chat_schema = chat.clone();
    chat_schema["tools"] = Value::Null;
    chat_schema["response_format"] =
        json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema()}});
    let mut chat_v4 = chat.clone();
    chat_v4["model"] = json!("DeepSeek-V4-Pro");
    let responses = json!({"model": "DeepSeek-V4.1-Flash", "instructions": MARK, "tools": [
        {"type": "function", "name": "f", "description": MARK, "parameters": schema()},
        {"type": "namespace", "name": "n", "description": MARK, "tools": [
            {"type": "function", "name": "h", "description": MARK, "parameters": schema()}]}],
        "input": [
        {"type": "message", "role": "developer", "content": MARK},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": MARK},
            {"type": "input_image", "image_url": PNG}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": MARK}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": MARK}]},
        {"type": "function_call", "call_id": "a", "name": MARK, "arguments": "{\"FIELD\":\"FIELD\"}"},
        {"type": "function_call_output", "call_id": "a", "output": MARK},
        {"type": "custom_tool_call", "call_id": "c", "name": MARK, "input": MARK},
        {"type": "custom_tool_call_output", "call_id": "c", "output": MARK},
        {"role": "user", "content": MARK}]});
    let messages = json!({"model": "DeepSeek-V4.1-Flash", "max_tokens": 100,
        "system": [{"type": "text", "text": MARK}],
        "tools": [{"name": "f", "description": MARK, "input_schema": schema()}],
        "messages": [
        {"role": "user", "content": [{"type": "text", "text": MARK},
            {"type": "document", "source": {"type": "text", "media_type": MARK, "data": MARK}},
            {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": MARK, "signature": ""},
            {"type": "text", "text": MARK},
            {"type": "tool_use", "id": "a", "name": MARK, "input": {"FIELD": MARK}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a",
            "content": [{"type": "text", "text": MARK}]}]},
        {"role": "system", "content": MARK},
        {"role": "user", "content": MARK}]});
    vec![
        (Protocol::Chat, chat),
        (Protocol::Chat, chat_schema),
        (Protocol::Chat, chat_v4),
        (Protocol::Responses, responses),
        (Protocol::Messages, messages),
    ]
}

/// The body with each mark replaced: the JSON text of a spelling needs no escapes beyond its own.
fn body_with(template: &Value, field: Option<usize>, text: &str) -> Option<Vec<u8>> {
    let source = template.to_string();
    let parts: Vec<&str> = source.split(MARK).collect();
    let mut body = String::new();
    for (index, part) in parts.iter().enumerate() {
        body.push_str(part);
        if index + 1 < parts.len() {
            let is_chosen = field.is_none_or(|field| field == index);
            body.push_str(if is_chosen { text } else { MARK });
        }
    }
    (field.is_none_or(|field| field + 1 < parts.len())).then(|| body.into_bytes())
}

/// The added ids of the prompt, in order.
fn added_ids(protocol: Protocol, body: &[u8]) -> Vec<u32> {
    let options = Options::default();
    let request = convert(protocol, body, &options).unwrap_or_else(|error| {
        panic!("{error}: {}", String::from_utf8_lossy(body));
    });
    let tokens = SpecialTokens::default();
    let rendered = render(&request.conversation, request.model_version, &tokens);
    let tokenizer = tokenizer();
    let mut ids = tokenizer.encode_prompt(&rendered.prompt).expect("known specials");
    ids.retain(|id| tokenizer.is_added(*id));
    ids
}

/// Spellings that are special in the model's own earlier words (recipe.md, section 1.4).
fn grounding() -> Vec<String> {
    SpecialTokens::default().0[10..].to_vec()
}

fn spellings() -> Vec<String> {
    let tokenizer = tokenizer();
    let ids = (0..tokenizer.num_ids()).filter(|id| tokenizer.is_added(*id));
    let spellings: Vec<String> = ids.map(|id| tokenizer.token_text(id)).collect();
    assert_eq!(spellings.len(), 1_283);
    spellings
}

#[test]
fn s_08_ur_78_no_text_field_of_any_api_gives_a_special_id() {
    let plain: Vec<String> =
        spellings().into_iter().filter(|spelling| !grounding().contains(spelling)).collect();
    let all = plain.join(" ");
    for (protocol, template) in requests() {
        let baseline = added_ids(protocol, template.to_string().as_bytes());
        assert!(baseline.len() > 5, "{protocol:?}");
        let mut num_fields = 0;
        // Field by field, so that a leak names its field: all spellings, then the named ones alone.
        while let Some(body) = body_with(&template, Some(num_fields), &all) {
            assert_eq!(added_ids(protocol, &body), baseline, "{protocol:?} field {num_fields}");
            num_fields += 1;
        }
        assert!(num_fields >= 8, "{protocol:?}: {num_fields} fields");
        for spelling in &plain {
            let body = body_with(&template, None, spelling).expect("all fields");
            assert_eq!(added_ids(protocol, &body), baseline, "{protocol:?} {spelling}");
        }
    }
}

#[test]
fn grounding_spellings_are_special_in_the_models_own_words_only() {
    let text = grounding().concat();
    for (protocol, template) in requests() {
        let baseline = added_ids(protocol, template.to_string().as_bytes());
        let mut gains = Vec::new();
        let mut field = 0;
        while let Some(body) = body_with(&template, Some(field), &text) {
            gains.push(added_ids(protocol, &body).len() - baseline.len());
            field += 1;
        }
        // Content and reasoning of the one assistant turn; nothing, or all eight.
        let num_special = gains.iter().filter(|gain| **gain == 8).count();
        assert!(gains.iter().all(|gain| *gain == 0 || *gain == 8), "{protocol:?}: {gains:?}");
        assert!(num_special <= 2, "{protocol:?}: {gains:?}");
    }
}

/// Split over two fields that are joined, a spelling is still only text.
#[test]
fn a_spelling_in_two_halves_stays_text() {
    for spelling in SpecialTokens::default().0.iter().chain(["<｜fim▁hole｜>".to_owned()].iter())
    {
        for (at, _) in spelling.char_indices().skip(1) {
            let (left, right) = spelling.split_at(at);
            let body = json!({"model": "DeepSeek-V4.1-Flash", "messages": [
                {"role": "user", "content": [{"type": "text", "text": left}]},
                {"role": "user", "content": right},
                {"role": "user", "content": format!("{left}{right}")}]});
            let ids = added_ids(Protocol::Chat, body.to_string().as_bytes());
            assert_eq!(ids, [0, 128_799, 128_803, 128_804, 128_821], "{spelling} at {at}");
        }
    }
}
