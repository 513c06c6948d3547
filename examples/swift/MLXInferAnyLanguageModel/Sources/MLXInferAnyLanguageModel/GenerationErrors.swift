import AnyLanguageModel
import MLXInferClient

/// An error in the words of AnyLanguageModel. Those that it has no case for stay what they are.
func generationError(_ error: any Error) -> any Error {
    func context(_ text: String) -> LanguageModelSession.GenerationError.Context { .init(debugDescription: text) }
    switch error {
    case MLXInferError.api(let refusal) where refusal.isTooLong:
        return LanguageModelSession.GenerationError.exceededContextWindowSize(context(refusal.description))
    case MLXInferError.api(let refusal) where refusal.status == 429:
        return LanguageModelSession.GenerationError.rateLimited(context(refusal.description))
    case MLXInferError.api(let refusal) where refusal.param == "response_format" || refusal.param?.hasPrefix("tools[") == true:
        return LanguageModelSession.GenerationError.unsupportedGuide(context(refusal.description))
    case MLXInferError.undecodableAnswer(_, let reason):
        return LanguageModelSession.GenerationError.decodingFailure(context(reason))
    default: return error
    }
}
