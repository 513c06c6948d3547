/// One message of a conversation.
///
/// Apps can store messages: their coded form stays the same in later versions, and differs from what is sent.
public struct Message: Sendable, Hashable, Codable {
    public var role: Role
    /// Texts and pictures, in their order. Pictures belong in messages of the user and in results of tools.
    public var parts: [ContentPart]
    /// What the assistant thought before it answered; the model's template keeps or drops it.
    public var reasoning: String?
    /// The calls that the assistant made in this message.
    public var toolCalls: [ToolCall]
    /// In a message of a tool: which call it answers.
    public var toolCallID: String?

    public init(role: Role, content: String, reasoning: String? = nil, toolCalls: [ToolCall] = [], toolCallID: String? = nil) {
        self.init(role: role, parts: [.text(content)], reasoning: reasoning, toolCalls: toolCalls, toolCallID: toolCallID)
    }

    public init(role: Role, parts: [ContentPart], reasoning: String? = nil, toolCalls: [ToolCall] = [], toolCallID: String? = nil) {
        (self.role, self.parts, self.reasoning) = (role, parts, reasoning)
        (self.toolCalls, self.toolCallID) = (toolCalls, toolCallID)
    }

    /// The text of all parts. Setting it replaces the texts and keeps the pictures, which then come first.
    public var content: String {
        get { parts.compactMap(\.text).joined() }
        set { parts = parts.filter { $0.text == nil } + [.text(newValue)] }
    }

    /// True if the message has a picture.
    public var hasAttachments: Bool { parts.contains { $0.text == nil } }

    /// Instructions that stand before the conversation.
    public static func system(_ content: String) -> Message { Message(role: .system, content: content) }

    public static func user(_ content: String) -> Message { Message(role: .user, content: content) }

    /// Texts and pictures of the user.
    public static func user(_ parts: [ContentPart]) -> Message { Message(role: .user, parts: parts) }

    public static func assistant(_ content: String) -> Message { Message(role: .assistant, content: content) }

    /// The result of a call that the assistant made.
    public static func tool(_ content: String, callID: String) -> Message {
        Message(role: .tool, content: content, toolCallID: callID)
    }

    /// The result of a call, such as a screenshot.
    public static func tool(_ parts: [ContentPart], callID: String) -> Message {
        Message(role: .tool, parts: parts, toolCallID: callID)
    }
}

extension Message {
    var json: JSONValue {
        var object: JSONObject = ["role": .string(role.rawValue), "content": content(as: \.json)]
        object["reasoning_content"] = reasoning.map { .string($0) }
        object["tool_calls"] = toolCalls.isEmpty ? nil : .array(toolCalls.map(\.json))
        object["tool_call_id"] = toolCallID.map { .string($0) }
        return .object(object)
    }

    /// The content in the shape of an API: text where there are no pictures.
    func content(as shape: (ContentPart) -> JSONValue) -> JSONValue {
        hasAttachments ? .array(parts.map(shape)) : .string(content)
    }
}
