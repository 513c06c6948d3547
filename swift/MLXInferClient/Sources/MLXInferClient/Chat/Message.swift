/// One message of a conversation.
public struct Message: Sendable, Hashable {
    public var role: Role
    public var content: String
    /// What the assistant thought before it answered; the model's template keeps or drops it.
    public var reasoning: String?
    /// The calls that the assistant made in this message.
    public var toolCalls: [ToolCall]
    /// In a message of a tool: which call it answers.
    public var toolCallID: String?

    public init(role: Role, content: String, reasoning: String? = nil, toolCalls: [ToolCall] = [], toolCallID: String? = nil) {
        (self.role, self.content, self.reasoning) = (role, content, reasoning)
        (self.toolCalls, self.toolCallID) = (toolCalls, toolCallID)
    }

    /// Instructions that stand before the conversation.
    public static func system(_ content: String) -> Message { Message(role: .system, content: content) }

    public static func user(_ content: String) -> Message { Message(role: .user, content: content) }

    public static func assistant(_ content: String) -> Message { Message(role: .assistant, content: content) }

    /// The result of a call that the assistant made.
    public static func tool(_ content: String, callID: String) -> Message {
        Message(role: .tool, content: content, toolCallID: callID)
    }
}

extension Message {
    var json: JSONValue {
        var object: JSONObject = ["role": .string(role.rawValue), "content": .string(content)]
        object["reasoning_content"] = reasoning.map { .string($0) }
        object["tool_calls"] = toolCalls.isEmpty ? nil : .array(toolCalls.map(\.json))
        object["tool_call_id"] = toolCallID.map { .string($0) }
        return .object(object)
    }
}
