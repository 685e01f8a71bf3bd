//! Tool declarations of a Responses request: flattened namespaces, fixed custom tools, tool search
//! (recipe.md, section 8.4).

use std::collections::{HashMap, HashSet};

use serde_json::{Value, json};

use super::wire::{Execution, Function, InnerTool, Tool};
use crate::convert::tools::{ClientTool, check_name};
use crate::convert::{Options, WebSearch, bad};
use crate::types::{Error, ModelVersion};

const APPLY_PATCH: &str = "apply_patch";
/// Model input that was fixed in training, to be reproduced byte for byte.
const APPLY_PATCH_DESCRIPTION: &str = include_str!("apply_patch.txt");
pub const TOOL_SEARCH: &str = "tool_search";

/// The declarations of a request, in order, and the names that calls of them carry.
pub struct Registry<'a> {
    version: ModelVersion,
    options: &'a Options,
    pub tools: Vec<ClientTool>,
    pub custom_tools: Vec<String>,
    pub client_tool_search: bool,
    /// (function name, namespace, local name), in declaration order.
    pub namespaces: Vec<(String, String, String)>,
    names: FunctionNames,
}

impl<'a> Registry<'a> {
    /// `top_level` are the function names that count as taken from the start, wherever declared.
    pub fn new(
        version: ModelVersion,
        options: &'a Options,
        top_level: impl Iterator<Item = String>,
    ) -> Self {
        Registry {
            version,
            options,
            tools: Vec::new(),
            custom_tools: Vec::new(),
            client_tool_search: false,
            namespaces: Vec::new(),
            names: FunctionNames {
                version,
                taken: top_level.collect(),
                next_suffix: HashMap::new(),
                by_pair: HashMap::new(),
            },
        }
    }

    /// Adds one declaration found at `location`. `is_deferred` marks those of a tool search.
    pub fn declare(
        &mut self,
        tool: Tool,
        location: impl Fn() -> String,
        is_deferred: bool,
    ) -> Result<(), Error> {
        match tool {
            Tool::Function(function) => {
                check_name(&function.name, &location)?;
                self.add(function, is_deferred);
            }
            Tool::Namespace { name, description, tools } => {
                check_name(&name, &location)?;
                let description = description.as_deref().filter(|text| !text.is_empty());
                self.declare_namespace(&name, description, tools, location, is_deferred)?;
            }
            Tool::Custom { name } => self.declare_custom(&name, is_deferred)?,
            Tool::Search { execution, description, parameters } => {
                if self.version == ModelVersion::V41 && execution == Some(Execution::Client) {
                    self.client_tool_search = true;
                    let name = TOOL_SEARCH.to_owned();
                    let search = Function { name, description, parameters, strict: None };
                    self.add(search, is_deferred);
                }
            }
            Tool::WebSearch(_) | Tool::WebSearch20250826(_) => {
                if self.options.responses_web_search == WebSearch::Reject {
                    return Err(bad("Server tools are not supported"));
                }
            }
            Tool::Unknown => {}
        }
        Ok(())
    }

    fn add(&mut self, function: Function, is_deferred: bool) {
        self.tools.push(ClientTool {
            name: function.name,
            description: function.description,
            parameters: function.parameters,
            strict: function.strict,
            defer_loading: is_deferred,
        });
    }

    fn declare_custom(&mut self, name: &str, is_deferred: bool) -> Result<(), Error> {
        if name != APPLY_PATCH {
            return Err(bad(format!(
                "Unsupported custom tool: '{name}'. Only '{APPLY_PATCH}' is supported."
            )));
        }
        // The V4 template was trained without one blank line.
        let description = match self.version {
            ModelVersion::V41 => APPLY_PATCH_DESCRIPTION.to_owned(),
            ModelVersion::V4 => APPLY_PATCH_DESCRIPTION.replacen("envelope:\n\n", "envelope:\n", 1),
        };
        self.custom_tools.push(APPLY_PATCH.to_owned());
        let patch = Function {
            name: APPLY_PATCH.to_owned(),
            description: Some(description),
            parameters: Some(apply_patch_parameters()),
            strict: None,
        };
        self.add(patch, is_deferred);
        Ok(())
    }

    fn declare_namespace(
        &mut self,
        namespace: &str,
        description: Option<&str>,
        tools: Vec<InnerTool>,
        location: impl Fn() -> String,
        is_deferred: bool,
    ) -> Result<(), Error> {
        let mut seen = HashSet::with_capacity(tools.len());
        for (index, tool) in tools.into_iter().enumerate() {
            let inner = || format!("{}.tools[{index}]", location());
            let mut function = match tool {
                InnerTool::Function(function) => function,
                InnerTool::Custom { name } => {
                    return Err(bad(format!(
                        "Currently custom tools are not allowed inside a namespace. Found custom \
                         tool '{name}' in {}.",
                        inner()
                    )));
                }
            };
            check_name(&function.name, inner)?;
            if !seen.insert(function.name.clone()) {
                return Err(bad("Tool names within a namespace must be unique."));
            }
            let name = self.names.declare(namespace, &function.name);
            let local = std::mem::replace(&mut function.name, name.clone());
            self.namespaces.push((name, namespace.to_owned(), local));
            if let (ModelVersion::V41, Some(prefix)) = (self.version, description) {
                let own = function.description.as_deref().unwrap_or("");
                function.description = Some(format!("{prefix}\n{own}"));
            }
            self.add(function, is_deferred);
        }
        Ok(())
    }

    /// The function name of a past call of `name` in `namespace`.
    pub fn called_name(&mut self, namespace: String, name: String) -> String {
        self.names.called(namespace, name)
    }
}

fn apply_patch_parameters() -> Value {
    json!({
        "type": "object",
        "additionalProperties": false,
        "properties": {"input": {
            "type": "string",
            "description": "The entire contents of the apply_patch command (the *** Begin Patch \
                            ... *** End Patch envelope).",
        }},
        "required": ["input"],
    })
}

/// Unique function names for (namespace, local name) pairs.
struct FunctionNames {
    version: ModelVersion,
    taken: HashSet<String>,
    /// The next suffix to try for a joined name. Without it, n equal names take n² trials.
    next_suffix: HashMap<String, usize>,
    by_pair: HashMap<(String, String), String>,
}

impl FunctionNames {
    /// A fresh name; the first one of a pair is the pair's name from then on.
    fn declare(&mut self, namespace: &str, name: &str) -> String {
        let fresh = self.fresh(namespace, name);
        self.by_pair
            .entry((namespace.to_owned(), name.to_owned()))
            .or_insert_with(|| fresh.clone());
        fresh
    }

    fn called(&mut self, namespace: String, name: String) -> String {
        let pair = (namespace, name);
        if let Some(known) = self.by_pair.get(&pair) {
            return known.clone();
        }
        let fresh = self.fresh(&pair.0, &pair.1);
        self.by_pair.insert(pair, fresh.clone());
        fresh
    }

    fn fresh(&mut self, namespace: &str, name: &str) -> String {
        let joined = match self.version {
            ModelVersion::V41 => format!("{namespace}::{name}"),
            ModelVersion::V4 if namespace.ends_with('_') || name.starts_with('_') => {
                format!("{namespace}{name}")
            }
            ModelVersion::V4 => format!("{namespace}__{name}"),
        };
        if self.taken.insert(joined.clone()) {
            return joined;
        }
        let suffix = self.next_suffix.entry(joined.clone()).or_insert(1);
        loop {
            let candidate = format!("{joined}_{suffix}");
            *suffix += 1;
            if self.taken.insert(candidate.clone()) {
                return candidate;
            }
        }
    }
}

/// One declaration as responses report it; `None` for an unknown type, which is not reported.
pub fn reported(tool: &Tool) -> Option<Value> {
    let web_search = |kind: &str, search: &super::wire::WebSearch| {
        json!({
            "type": kind,
            "search_context_size": search.search_context_size,
            "user_location": search.user_location,
        })
    };
    Some(match tool {
        Tool::Function(function) => reported_function(function),
        Tool::Namespace { name, description, tools } => json!({
            "type": "namespace",
            "name": name,
            "description": description,
            "tools": tools.iter().map(reported_inner).collect::<Vec<_>>(),
        }),
        Tool::Custom { name } => json!({"type": "custom", "name": name}),
        Tool::Search { execution, description, parameters } => json!({
            "type": TOOL_SEARCH,
            "execution": execution,
            "description": description,
            "parameters": parameters,
        }),
        Tool::WebSearch(search) => web_search("web_search", search),
        Tool::WebSearch20250826(search) => web_search("web_search_2025_08_26", search),
        Tool::Unknown => return None,
    })
}

/// The declarations that a tool search found, with namespaces flattened. `Err` when one is of an
/// unknown type.
pub fn reported_flat(tools: &[Tool]) -> Result<Value, ()> {
    let mut out = Vec::with_capacity(tools.len());
    for tool in tools {
        match tool {
            Tool::Namespace { name, description, tools } => {
                for tool in tools {
                    let mut tool = reported_inner(tool);
                    let description = description.as_deref().unwrap_or("");
                    tool["namespace"] = json!({"name": name, "description": description});
                    out.push(tool);
                }
            }
            other => out.push(reported(other).ok_or(())?),
        }
    }
    Ok(Value::Array(out))
}

fn reported_inner(tool: &InnerTool) -> Value {
    match tool {
        InnerTool::Function(function) => reported_function(function),
        InnerTool::Custom { name } => json!({"type": "custom", "name": name}),
    }
}

fn reported_function(function: &Function) -> Value {
    let mut out = json!({
        "type": "function",
        "name": function.name,
        "description": function.description,
        "parameters": null,
        "strict": function.strict,
    });
    // A clone is several times cheaper than the serializer that `json!` goes through.
    if let Some(parameters) = &function.parameters {
        out["parameters"] = parameters.clone();
    }
    out
}
