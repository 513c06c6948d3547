/// How tokens are chosen.
public struct GenerationOptions: Sendable, Equatable {
    public struct SamplingMode: Sendable, Equatable {
        public enum Kind: Sendable, Equatable {
            case greedy
            case randomTopK(_: Int, seed: UInt64?)
            case randomProbabilityThreshold(_: Double, seed: UInt64?)
        }

        public let kind: Kind
        public static var greedy: SamplingMode { SamplingMode(kind: .greedy) }
        public static func random(top k: Int, seed: UInt64? = nil) -> SamplingMode { SamplingMode(kind: .randomTopK(k, seed: seed)) }
        public static func random(probabilityThreshold: Double, seed: UInt64? = nil) -> SamplingMode {
            SamplingMode(kind: .randomProbabilityThreshold(probabilityThreshold, seed: seed))
        }
    }

    public struct ToolCallingMode: Sendable, Equatable {
        public enum Kind: Sendable, Equatable { case allowed, required, disallowed }

        public var kind: Kind
        public static let allowed = ToolCallingMode(kind: .allowed)
        public static let required = ToolCallingMode(kind: .required)
        public static let disallowed = ToolCallingMode(kind: .disallowed)
    }

    public var samplingMode: SamplingMode?
    public var temperature: Double?
    public var maximumResponseTokens: Int?
    public var toolCallingMode: ToolCallingMode?

    public init(samplingMode: SamplingMode? = nil, temperature: Double? = nil, maximumResponseTokens: Int? = nil) {
        self.init(
            samplingMode: samplingMode, temperature: temperature, maximumResponseTokens: maximumResponseTokens, toolCallingMode: nil)
    }

    public init(
        samplingMode: SamplingMode? = nil, temperature: Double? = nil, maximumResponseTokens: Int? = nil, toolCallingMode: ToolCallingMode?
    ) {
        (self.samplingMode, self.temperature) = (samplingMode, temperature)
        (self.maximumResponseTokens, self.toolCallingMode) = (maximumResponseTokens, toolCallingMode)
    }
}

/// What the model reads besides the conversation.
public struct ContextOptions: Sendable, Equatable {
    public enum ReasoningLevel: Sendable, Equatable {
        case light
        case moderate
        case deep
        case custom(String)
    }

    public var includeSchemaInPrompt: Bool?
    public var reasoningLevel: ReasoningLevel?

    public init(includeSchemaInPrompt: Bool? = nil, reasoningLevel: ReasoningLevel? = nil) {
        (self.includeSchemaInPrompt, self.reasoningLevel) = (includeSchemaInPrompt, reasoningLevel)
    }
}
