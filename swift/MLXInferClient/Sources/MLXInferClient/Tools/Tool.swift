/// A function that the model may ask the app to call.
public struct Tool: Sendable, Hashable {
    public var name: String
    public var description: String
    /// The JSON schema of the arguments, an object.
    public var parameters: JSONValue
    /// Whether arguments must fit the schema; a schema that the server cannot hold is refused then.
    public var strict: Bool

    public init(name: String, description: String, parameters: JSONValue, strict: Bool = false) {
        (self.name, self.description, self.parameters, self.strict) = (name, description, parameters, strict)
    }

    var json: JSONValue {
        var function: JSONObject = ["name": .string(name), "description": .string(description), "parameters": parameters]
        function["strict"] = strict ? true : nil
        return ["type": "function", "function": .object(function)]
    }
}

/// Whether the model calls tools.
public enum ToolChoice: Sendable, Hashable {
    /// As the model sees fit.
    case auto
    /// Not in this answer.
    case none
    /// At least one.
    case required
    /// This one.
    case tool(String)

    var json: JSONValue {
        switch self {
        case .auto: "auto"
        case .none: "none"
        case .required: "required"
        case .tool(let name): ["type": "function", "function": ["name": .string(name)]]
        }
    }
}

/// A call of a tool, complete.
public struct ToolCall: Sendable, Hashable, Codable {
    public var id: String
    public var name: String
    /// The arguments as the model wrote them, JSON as a rule.
    public var arguments: String

    public init(id: String, name: String, arguments: String) {
        (self.id, self.name, self.arguments) = (id, name, arguments)
    }

    /// The arguments as a type of yours.
    ///
    /// - Throws: ``MLXInferError/undecodableAnswer(text:reason:)`` where they are not what that type expects.
    public func decodedArguments<Arguments: Decodable>(as type: Arguments.Type = Arguments.self) throws -> Arguments {
        try decodeAnswer(arguments, as: type)
    }

    var json: JSONValue {
        ["id": .string(id), "type": "function", "function": ["name": .string(name), "arguments": .string(arguments)]]
    }
}

/// A piece of a call: the first one of an index has the id and the name, the others more of the arguments.
public struct ToolCallDelta: Sendable, Hashable {
    public var index: Int
    public var id: String?
    public var name: String?
    public var arguments: String

    public init(index: Int, id: String? = nil, name: String? = nil, arguments: String = "") {
        (self.index, self.id, self.name, self.arguments) = (index, id, name, arguments)
    }
}
