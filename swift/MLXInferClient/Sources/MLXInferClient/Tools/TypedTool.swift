/// A tool whose arguments are a type of yours.
///
/// ```swift
/// struct Place: Decodable { let city: String }
/// let weather = TypedTool<Place>(name: "weather", description: "The weather in a city", parameters: [
///     "type": "object", "properties": ["city": ["type": "string"]], "required": ["city"],
/// ])
/// request.tools = [weather.tool]
/// for call in try await client.respond(to: request).toolCalls {
///     if let place = try weather.arguments(of: call) { request.messages.append(.tool(forecast(place.city), callID: call.id)) }
/// }
/// ```
public struct TypedTool<Arguments: Decodable>: Sendable {
    /// What a request offers.
    public var tool: Tool

    /// - Parameters:
    ///   - parameters: The JSON schema of the arguments, an object.
    ///   - strict: Whether arguments must fit the schema; a schema that the server cannot hold is refused then.
    public init(name: String, description: String, parameters: JSONValue, strict: Bool = false) {
        tool = Tool(name: name, description: description, parameters: parameters, strict: strict)
    }

    /// The arguments of a call; nil if it is of another tool.
    ///
    /// - Throws: ``MLXInferError/undecodableAnswer(text:reason:)`` where they are not what the type expects.
    public func arguments(of call: ToolCall) throws -> Arguments? {
        call.name == tool.name ? try call.decodedArguments(as: Arguments.self) : nil
    }

    /// The arguments of a call that is still being written, as far as they are; nil if it is of another tool, or too little is there.
    public func partialArguments(of call: ToolCall) -> Arguments? {
        call.name == tool.name ? call.partialArguments(as: Arguments.self) : nil
    }
}
