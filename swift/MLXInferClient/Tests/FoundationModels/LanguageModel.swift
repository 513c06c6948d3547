import Foundation

/// A model that a session can talk to.
public protocol LanguageModel: Sendable {
    associatedtype Executor: LanguageModelExecutor where Self == Executor.Model
    var capabilities: LanguageModelCapabilities { get }
    var executorConfiguration: Executor.Configuration { get }
}

public struct LanguageModelCapabilities: Sendable {
    public struct Capability: Sendable, Hashable {
        let name: String
        public static var vision: Capability { Capability(name: "vision") }
        public static var guidedGeneration: Capability { Capability(name: "guidedGeneration") }
        public static var reasoning: Capability { Capability(name: "reasoning") }
        public static var toolCalling: Capability { Capability(name: "toolCalling") }
    }

    private let known: Set<Capability>
    public init(_ capabilities: [Capability]) { known = Set(capabilities) }
    public func contains(_ capability: Capability) -> Bool { known.contains(capability) }
}

/// What runs the requests of a model.
public protocol LanguageModelExecutor: Sendable {
    associatedtype Configuration: Hashable, Sendable
    associatedtype Model: LanguageModel
    func prewarm(model: Model, transcript: Transcript)
    init(configuration: Configuration) throws
    nonisolated(nonsending) func respond(
        to request: LanguageModelExecutorGenerationRequest, model: Model, streamingInto channel: LanguageModelExecutorGenerationChannel
    ) async throws
}

extension LanguageModelExecutor {
    public func prewarm(model: Model, transcript: Transcript) {}
}

public struct LanguageModelExecutorGenerationRequest: Sendable {
    public var id: UUID
    public var transcript: Transcript
    public var enabledToolDefinitions: [Transcript.ToolDefinition]
    public var schema: GenerationSchema?
    public var generationOptions: GenerationOptions
    public var contextOptions: ContextOptions
    public var metadata: [String: any Sendable & Codable & Equatable]

    public init(
        id: UUID, transcript: Transcript, enabledTools: [Transcript.ToolDefinition], schema: GenerationSchema? = nil,
        generationOptions: GenerationOptions, contextOptions: ContextOptions, metadata: [String: any Sendable & Codable & Equatable]
    ) {
        (self.id, self.transcript, self.enabledToolDefinitions, self.schema) = (id, transcript, enabledTools, schema)
        (self.generationOptions, self.contextOptions, self.metadata) = (generationOptions, contextOptions, metadata)
    }
}

/// A function that a session runs for its model.
public protocol Tool<Arguments, Output>: Sendable {
    associatedtype Output: PromptRepresentable
    associatedtype Arguments: ConvertibleFromGeneratedContent
    var name: String { get }
    var description: String { get }
    var parameters: GenerationSchema { get }
    @concurrent func call(arguments: Arguments) async throws -> Output
}

extension Tool {
    public var name: String { "\(Self.self)" }
}

extension Tool where Arguments: Generable {
    public var parameters: GenerationSchema { Arguments.generationSchema }
}
