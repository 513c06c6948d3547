import Foundation

/// A tool with the closure that runs it.
///
/// ```swift
/// struct Place: GuidedObject, Decodable, Sendable {
///     let city: String
///     static var properties: [Property<Place>] { Property("city", \.city, .string(maxLength: 40)) }
/// }
/// let weather = CallableTool("weather", "The weather in a city") { (place: Place) in "21 degrees in \(place.city)" }
/// let run = try await client.respond(to: request, calling: [weather])
/// ```
public struct CallableTool: Sendable {
    /// What a request offers.
    public let tool: Tool
    private let run: @Sendable (ToolCall) async throws -> [ContentPart]

    /// A tool with a closure for calls as they are, and results of texts and pictures.
    public init(_ tool: Tool, run: @escaping @Sendable (ToolCall) async throws -> [ContentPart]) { (self.tool, self.run) = (tool, run) }

    /// A tool whose arguments are a type of yours.
    ///
    /// - Parameters:
    ///   - strict: Whether arguments must fit the schema; a schema that the server cannot hold is refused then.
    ///   - run: Returns the result: a text is handed to the model as it is, every other value as JSON.
    public init<Arguments: Guided, Output: Encodable & Sendable>(
        _ name: String, _ description: String, strict: Bool = true, run: @escaping @Sendable (Arguments) async throws -> Output
    ) {
        self = TypedTool<Arguments>(name: name, description: description, strict: strict).calling(run)
    }

    /// Runs a call.
    ///
    /// - Throws: What the closure throws, and ``MLXInferError/undecodableAnswer(text:reason:)`` for other arguments than its type has.
    public func callAsFunction(_ call: ToolCall) async throws -> [ContentPart] { try await run(call) }
}

extension TypedTool where Arguments: JSONSchemaProviding {
    /// A tool whose arguments give their schema.
    public init(name: String, description: String, strict: Bool = false) {
        self.init(name: name, description: description, parameters: Arguments.jsonSchema.json.schemaForRequest(), strict: strict)
    }
}

extension TypedTool where Arguments: Sendable {
    /// The tool with a closure that runs it.
    public func calling<Output: Encodable & Sendable>(_ run: @escaping @Sendable (Arguments) async throws -> Output) -> CallableTool {
        CallableTool(tool) { call in
            let output = try await run(try call.decodedArguments(as: Arguments.self))
            if let text = output as? String { return [.text(text)] }
            return [.text(String(decoding: try JSONEncoder().encode(output), as: UTF8.self))]
        }
    }

    /// The tool with a closure whose result has pictures, such as a screenshot.
    public func calling(_ run: @escaping @Sendable (Arguments) async throws -> [ContentPart]) -> CallableTool {
        CallableTool(tool) { try await run(try $0.decodedArguments(as: Arguments.self)) }
    }
}
