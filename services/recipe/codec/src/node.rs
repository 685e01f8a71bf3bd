//! A parsed JSON document that borrows from its text.
//!
//! Requests are parsed to a document before they are typed, so that a repeated key takes its last
//! value and a syntax error anywhere comes first. `serde_json::Value` would do; but it copies every
//! key and string and hashes every key, which took most of a conversion's time.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use serde::de::value::{MapAccessDeserializer, MapDeserializer, SeqDeserializer};
use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, EnumAccess, Error as _, IntoDeserializer,
    MapAccess, SeqAccess, Unexpected, VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;
#[cfg(test)]
use serde_json::Value;
use serde_json::{Error, Number};

#[derive(Clone, Debug, PartialEq)]
pub enum Node<'a> {
    Null,
    Bool(bool),
    Number(Number),
    String(Cow<'a, str>),
    Array(Vec<Node<'a>>),
    /// Keys are distinct, in the order of their first occurrence.
    Object(Vec<(Cow<'a, str>, Node<'a>)>),
}

/// Up to this many keys, comparing all pairs is cheaper than hashing.
const MAX_KEYS_COMPARED: usize = 16;

impl<'a> Node<'a> {
    /// Parses a whole body. The parser refuses more than 127 levels, which bounds every recursion
    /// over the result.
    pub fn parse(body: &'a [u8]) -> Result<Self, Error> {
        match std::str::from_utf8(body) {
            Ok(text) => serde_json::from_str(text),
            // The parser places the error better.
            Err(_) => serde_json::from_slice(body),
        }
    }

    /// The value of `key`; `None` when absent or when this is no object.
    pub fn get(&self, key: &str) -> Option<&Node<'a>> {
        match self {
            Node::Object(pairs) => pairs.iter().find(|(name, _)| name == key).map(|pair| &pair.1),
            _ => None,
        }
    }

    /// Takes the value of `key` out of an object.
    pub fn take(&mut self, key: &str) -> Option<Node<'a>> {
        let Node::Object(pairs) = self else { return None };
        let at = pairs.iter().position(|(name, _)| name == key)?;
        Some(pairs.remove(at).1)
    }

    #[cfg(test)]
    pub fn into_value(self) -> Value {
        match self {
            Node::Null => Value::Null,
            Node::Bool(value) => Value::Bool(value),
            Node::Number(number) => Value::Number(number),
            Node::String(text) => Value::String(text.into_owned()),
            Node::Array(items) => items.into_iter().map(Node::into_value).collect(),
            Node::Object(pairs) => pairs
                .into_iter()
                .map(|(key, value)| (key.into_owned(), value.into_value()))
                .collect(),
        }
    }

    fn unexpected(&self) -> Unexpected<'_> {
        match self {
            Node::Null => Unexpected::Unit,
            Node::Bool(value) => Unexpected::Bool(*value),
            Node::Number(number) => match (number.as_u64(), number.as_i64()) {
                (Some(value), _) => Unexpected::Unsigned(value),
                (None, Some(value)) => Unexpected::Signed(value),
                (None, None) => Unexpected::Float(number.as_f64().unwrap_or(0.0)),
            },
            Node::String(text) => Unexpected::Str(text),
            Node::Array(_) => Unexpected::Seq,
            Node::Object(_) => Unexpected::Map,
        }
    }
}

/// Keeps the last value of a repeated key, at the place of the first.
fn distinct<'a>(pairs: Vec<(Cow<'a, str>, Node<'a>)>) -> Vec<(Cow<'a, str>, Node<'a>)> {
    let is_distinct = if pairs.len() <= MAX_KEYS_COMPARED {
        pairs.iter().enumerate().all(|(at, (key, _))| pairs[..at].iter().all(|pair| pair.0 != *key))
    } else {
        let mut seen = std::collections::HashSet::with_capacity(pairs.len());
        pairs.iter().all(|(key, _)| seen.insert(key))
    };
    if is_distinct {
        return pairs;
    }
    let mut positions: HashMap<Cow<'a, str>, usize> = HashMap::with_capacity(pairs.len());
    let mut out: Vec<(Cow<'a, str>, Node<'a>)> = Vec::with_capacity(pairs.len());
    for (key, value) in pairs {
        match positions.get(&key) {
            Some(position) => out[*position].1 = value,
            None => {
                positions.insert(key.clone(), out.len());
                out.push((key, value));
            }
        }
    }
    out
}

impl<'de> Deserialize<'de> for Node<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any valid JSON value")
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Node::Null)
    }

    fn visit_none<E>(self) -> Result<Self::Value, E> {
        Ok(Node::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        Deserialize::deserialize(deserializer)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Self::Value, E> {
        Ok(Node::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Self::Value, E> {
        Ok(Node::Number(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Self::Value, E> {
        Ok(Node::Number(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Self::Value, E> {
        Ok(Number::from_f64(value).map_or(Node::Null, Node::Number))
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Node::String(Cow::Borrowed(text)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Node::String(Cow::Owned(text.to_owned())))
    }

    fn visit_string<E>(self, text: String) -> Result<Self::Value, E> {
        Ok(Node::String(Cow::Owned(text)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let mut out = Vec::with_capacity(items.size_hint().unwrap_or(0).min(4096));
        while let Some(item) = items.next_element()? {
            out.push(item);
        }
        Ok(Node::Array(out))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut pairs: A) -> Result<Self::Value, A::Error> {
        let mut out = Vec::with_capacity(pairs.size_hint().unwrap_or(4).min(4096));
        while let Some((Key(key), value)) = pairs.next_entry()? {
            out.push((key, value));
        }
        Ok(Node::Object(distinct(out)))
    }
}

/// A key that borrows where the text allows it.
struct Key<'a>(Cow<'a, str>);

impl<'de> Deserialize<'de> for Key<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KeyVisitor;
        impl<'de> Visitor<'de> for KeyVisitor {
            type Value = Key<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Key(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Key(Cow::Owned(text.to_owned())))
            }

            fn visit_string<E>(self, text: String) -> Result<Self::Value, E> {
                Ok(Key(Cow::Owned(text)))
            }
        }
        deserializer.deserialize_str(KeyVisitor)
    }
}

impl<'de> IntoDeserializer<'de, Error> for Node<'de> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

fn visit_text<'de, V: Visitor<'de>>(text: Cow<'de, str>, visitor: V) -> Result<V::Value, Error> {
    match text {
        Cow::Borrowed(text) => visitor.visit_borrowed_str(text),
        Cow::Owned(text) => visitor.visit_string(text),
    }
}

/// Types a document by the rules, and with the refusals, of `serde_json::from_value`.
impl<'de> Deserializer<'de> for Node<'de> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self {
            Node::Null => visitor.visit_unit(),
            Node::Bool(value) => visitor.visit_bool(value),
            Node::Number(number) => number.deserialize_any(visitor),
            Node::String(text) => visit_text(text, visitor),
            Node::Array(items) => {
                let mut items = SeqDeserializer::new(items.into_iter());
                let value = visitor.visit_seq(&mut items)?;
                items.end().map(|()| value)
            }
            Node::Object(pairs) => {
                let pairs = pairs.into_iter().map(|(key, value)| (Node::String(key), value));
                let mut pairs = MapDeserializer::new(pairs);
                let value = visitor.visit_map(&mut pairs)?;
                pairs.end().map(|()| value)
            }
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self {
            Node::Null => visitor.visit_none(),
            some => visitor.visit_some(some),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self {
            Node::String(text) => visitor.visit_enum(text.into_deserializer()),
            Node::Object(pairs) if pairs.len() == 1 => {
                let pairs = pairs.into_iter().map(|(key, value)| (Node::String(key), value));
                visitor.visit_enum(MapAccessDeserializer::new(MapDeserializer::new(pairs)))
            }
            Node::Object(_) => Err(Error::invalid_value(Unexpected::Map, &"map with a single key")),
            other => Err(Error::invalid_type(other.unexpected(), &"string or map")),
        }
    }

    /// A tag or a field name is a string, never a number.
    fn deserialize_identifier<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self {
            Node::String(text) => visit_text(text, visitor),
            other => Err(Error::invalid_type(other.unexpected(), &visitor)),
        }
    }

    /// Some map types read a null as empty; the contract does not.
    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self {
            Node::Object(_) => self.deserialize_any(visitor),
            other => Err(Error::invalid_type(other.unexpected(), &visitor)),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_unit()
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct struct
    }
}

/// What a document can be typed as without a detour over serde's buffers.
pub trait FromNode<'de>: Sized {
    fn from_node(node: Node<'de>) -> Result<Self, Error>;
}

impl<'de> FromNode<'de> for String {
    fn from_node(node: Node<'de>) -> Result<Self, Error> {
        Self::deserialize(node)
    }
}

/// Types a list whose elements are typed one by one.
pub fn list<'de, T: FromNode<'de>>(node: Node<'de>) -> Result<Vec<T>, Error> {
    match node {
        Node::Array(items) => items.into_iter().map(T::from_node).collect(),
        other => Err(Error::invalid_type(other.unexpected(), &"a sequence")),
    }
}

/// Types an object as the variant of `T` that its field `tag` names.
///
/// `T` derives the plain, externally tagged form. serde's internally tagged form reads the same
/// objects, but copies each of them to a buffer first.
pub fn tagged<'de, T: Deserialize<'de>>(node: Node<'de>, tag: &'static str) -> Result<T, Error> {
    let Node::Object(_) = &node else {
        return Err(Error::invalid_type(node.unexpected(), &"an object"));
    };
    let name = match node.get(tag) {
        Some(Node::String(name)) => name.clone(),
        Some(other) => {
            return Err(Error::invalid_type(other.unexpected(), &"variant identifier"));
        }
        None => return Err(Error::missing_field(tag)),
    };
    T::deserialize(Tagged { name, node })
}

struct Tagged<'de> {
    name: Cow<'de, str>,
    node: Node<'de>,
}

impl<'de> Deserializer<'de> for Tagged<'de> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_enum(self)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map struct enum identifier
        ignored_any
    }
}

impl<'de> EnumAccess<'de> for Tagged<'de> {
    type Error = Error;
    type Variant = Node<'de>;

    fn variant_seed<V: DeserializeSeed<'de>>(
        self,
        seed: V,
    ) -> Result<(V::Value, Self::Variant), Error> {
        let variant = seed.deserialize(Node::String(self.name))?;
        Ok((variant, self.node))
    }
}

/// The fields of a variant are those of the tagged object itself.
impl<'de> VariantAccess<'de> for Node<'de> {
    type Error = Error;

    fn unit_variant(self) -> Result<(), Error> {
        Ok(())
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Error> {
        seed.deserialize(self)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, Error> {
        self.deserialize_any(visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.deserialize_any(visitor)
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[test]
    fn a_repeated_key_takes_its_last_value_at_its_first_place() {
        let few = r#"{"a":1,"b":2,"a":{"c":3,"c":4}}"#;
        let many = format!(
            "{{{}\"k7\":\"last\"}}",
            (0..40).map(|n| format!("\"k{n}\":{n},")).collect::<String>()
        );
        for text in [few, &many] {
            let node = Node::parse(text.as_bytes()).expect("valid");
            let expected: Value = serde_json::from_str(text).expect("valid");
            assert_eq!(node.into_value().to_string(), expected.to_string());
        }
    }

    #[test]
    fn strings_are_borrowed_unless_they_hold_escapes() {
        let node = Node::parse(br#"["plain","esc\n"]"#).expect("valid");
        let Node::Array(items) = node else { panic!("an array") };
        assert!(matches!(&items[0], Node::String(Cow::Borrowed("plain"))));
        assert!(matches!(&items[1], Node::String(Cow::Owned(_))));
    }

    #[test]
    fn typing_refuses_with_the_words_of_the_json_library() {
        #[derive(Debug, Deserialize)]
        #[allow(dead_code, reason = "only refusals are looked at")]
        struct Sample {
            word: Option<Word>,
            number: Option<u8>,
            text: Option<String>,
            tagged: Option<Tagged>,
        }
        #[derive(Debug, Deserialize)]
        enum Word {
            #[serde(rename = "a")]
            A,
        }
        #[derive(Debug, Deserialize)]
        #[serde(tag = "type")]
        enum Tagged {
            B,
        }
        for text in [
            r#"{"word":1}"#,
            r#"{"word":"b"}"#,
            r#"{"word":{}}"#,
            r#"{"word":{"a":1}}"#,
            r#"{"number":256}"#,
            r#"{"number":-1}"#,
            r#"{"number":1.0}"#,
            r#"{"number":true}"#,
            r#"{"text":null,"number":[]}"#,
            r#"{"text":{}}"#,
            r#"{"tagged":{"type":0}}"#,
            r#"{"tagged":{}}"#,
            r#"[1]"#,
            r#""x""#,
            r#"null"#,
        ] {
            let node = Node::parse(text.as_bytes()).expect("valid");
            let actual = Sample::deserialize(node).expect_err(text).to_string();
            let value: Value = serde_json::from_str(text).expect("valid");
            let expected = serde_json::from_value::<Sample>(value).expect_err(text).to_string();
            assert_eq!(actual, expected, "{text}");
        }
        let accepted =
            Node::parse(br#"{"word":{"a":null},"text":"x","other":[1]}"#).expect("valid");
        assert!(Sample::deserialize(accepted).is_ok());
    }
}
