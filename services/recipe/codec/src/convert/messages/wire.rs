//! Field types of a Messages request (recipe.md, sections 9.1 and 9.2).

use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use serde_json::Value;

use crate::convert::wire::{EffortName, PlainKind, TextOr, Thinking, tagged_by};
use crate::json::{Style, to_string};
use crate::node::{self, FromNode, Node};

#[derive(Deserialize)]
#[serde(expecting = "an object")]
pub struct Request {
    pub model: String,
    /// Typed apart, for speed.
    #[serde(skip)]
    pub messages: Vec<InputMessage>,
    pub max_tokens: Option<u32>,
    pub system: Option<TextOr<SystemBlock, PlainKind>>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub stop_sequences: Option<Vec<String>>,
    pub stream: Option<bool>,
    pub tools: Option<Vec<Tool>>,
    pub tool_choice: Option<ToolChoice>,
    pub thinking: Option<Thinking>,
    pub output_config: Option<OutputConfig>,
    /// Type-checked only.
    #[serde(rename = "metadata")]
    _metadata: Option<Metadata>,
}

impl<'de> FromNode<'de> for Request {
    fn from_node(mut node: Node<'de>) -> Result<Self, serde_json::Error> {
        let messages = node.take("messages");
        let mut request = Request::deserialize(node)?;
        let messages = messages.ok_or_else(|| serde_json::Error::missing_field("messages"))?;
        request.messages = node::list(messages)?;
        Ok(request)
    }
}

tagged_by!("type": SystemBlock, Block, ResultBlock);

impl<'de> FromNode<'de> for InputMessage {
    fn from_node(mut node: Node<'de>) -> Result<Self, serde_json::Error> {
        let missing = serde_json::Error::missing_field;
        let content = node.take("content");
        let role = node.take("role").ok_or_else(|| missing("role"))?;
        Ok(InputMessage {
            role: Role::deserialize(role)?,
            content: TextOr::from_node(content.ok_or_else(|| missing("content"))?)?,
        })
    }
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
pub struct OutputConfig {
    pub effort: Option<EffortName>,
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct Metadata {
    #[serde(rename = "user_id")]
    _user_id: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SystemBlock {
    Text { text: String },
}

/// A tool with a `type` runs on a server; one without is the client's.
pub enum Tool {
    Server(ServerTool),
    Client(ClientTool),
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
pub struct ServerTool {
    #[serde(rename = "type")]
    pub kind: String,
    pub name: Option<String>,
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
pub struct ClientTool {
    pub name: String,
    pub description: Option<String>,
    #[serde(default)]
    pub input_schema: Value,
    pub defer_loading: Option<bool>,
}

impl<'de> Deserialize<'de> for Tool {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let node = Node::deserialize(deserializer)?;
        let tool = if node.get("type").is_some() {
            ServerTool::deserialize(node).map(Tool::Server)
        } else {
            ClientTool::deserialize(node).map(Tool::Client)
        };
        tool.map_err(D::Error::custom)
    }
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToolChoice {
    Auto {
        #[serde(rename = "disable_parallel_tool_use")]
        _disable_parallel_tool_use: Option<bool>,
    },
    Any {
        #[serde(rename = "disable_parallel_tool_use")]
        _disable_parallel_tool_use: Option<bool>,
    },
    Tool {
        name: String,
        #[serde(rename = "disable_parallel_tool_use")]
        _disable_parallel_tool_use: Option<bool>,
    },
    None,
}

pub struct InputMessage {
    pub role: Role,
    pub content: TextOr<Block, PlainKind>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    User,
    Assistant,
    System,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Block {
    Text {
        text: String,
    },
    Image {
        source: ImageSource,
    },
    Document {
        source: DocumentSource,
    },
    Thinking {
        thinking: String,
        /// Type-checked only.
        #[serde(rename = "signature")]
        _signature: Option<String>,
    },
    ServerToolUse {
        #[serde(rename = "id")]
        _id: String,
        #[serde(rename = "name")]
        _name: String,
        #[serde(rename = "input")]
        _input: Value,
    },
    ToolUse {
        id: String,
        name: String,
        input: Arguments,
    },
    ToolResult {
        tool_use_id: String,
        content: Option<TextOr<ResultBlock, PlainKind>>,
        /// Type-checked only.
        #[serde(rename = "is_error")]
        _is_error: Option<bool>,
    },
    WebSearchToolResult {
        #[serde(rename = "tool_use_id")]
        _tool_use_id: String,
        #[serde(rename = "content")]
        _content: Value,
    },
    ToolAddition {
        tool: AddedTool,
    },
}

/// The input of a call as the text that the conversation holds.
pub struct Arguments(pub String);

impl<'de> Deserialize<'de> for Arguments {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Node::deserialize(deserializer).map(|input| Arguments(to_string(&input, Style::Sp)))
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResultBlock {
    Text { text: String },
    Image { source: ImageSource },
    Document { source: DocumentSource },
    ToolReference { tool_name: String },
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum AddedTool {
    ToolReference { name: String },
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
pub struct DocumentSource {
    pub media_type: Option<String>,
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ImageSource {
    Base64 {
        media_type: MediaType,
        data: String,
    },
    Url {
        url: String,
    },
    File {
        #[serde(rename = "file_id")]
        _file_id: String,
    },
}

#[derive(Clone, Copy, Deserialize)]
pub enum MediaType {
    /// Two names of one type: the data URL says `image/jpeg`.
    #[serde(rename = "image/jpeg", alias = "image/jpg")]
    Jpeg,
    #[serde(rename = "image/png")]
    Png,
    #[serde(rename = "image/gif")]
    Gif,
    #[serde(rename = "image/webp")]
    Webp,
}

impl MediaType {
    pub fn as_str(self) -> &'static str {
        match self {
            MediaType::Jpeg => "image/jpeg",
            MediaType::Png => "image/png",
            MediaType::Gif => "image/gif",
            MediaType::Webp => "image/webp",
        }
    }
}
